"""Proves before the first step that divided experts compute what whole ones do, on the first batch of a training.

One forward pass, in evaluation mode and without gradients. Each layer of experts computes its tokens twice: with the
exchange, and without it, expert after expert with the weights of one rank of the group after the other, by the loop of
the model's own class. The results must be equal within rounding, token by token, and so must the gradients of a random
direction: of the tokens, of the weights of the router, and of each expert. No rank holds the experts of more than two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ds_trainer.engine.expert_parallel import expert_slice
from ds_trainer.training.loop.token_counter import number_format
from ds_trainer.training.model.expert_division import EXCHANGE, divided_layers
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import CHECK, get_logger
from ds_trainer.utils.two_runs import largest_row_difference
from ds_trainer.utils.undisturbed import undisturbed

if TYPE_CHECKING:
    from ds_trainer.training.assembly import Assembly

logger = get_logger(__name__)

_ROUNDING = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 8e-2, "fp16": 2e-2}
_PARTS = ("results", "gradients of tokens", "gradients of routing weights", "gradients of experts")
Experts = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_experts(assembly: Assembly, batch: Any) -> None:
    """Compare the divided experts of the model with whole ones. Collective.

    Args:
        assembly: the components of the Trainer.
        batch: the first micro-batch of this rank's replica.

    Raises:
        ConfigError: on all ranks, if a difference exceeds rounding; names the first layer with one.
    """
    trainer, model, size = assembly.trainer, assembly.trainer.model_wrapped, assembly.layout.ep
    layers = divided_layers(getattr(model, "module", model))
    with undisturbed(model), _comparing(layers) as found, assembly.losses.sharded(batch) as local:
        trainer.compute_loss(model, trainer._prepare_inputs(local))
    differences = torch.tensor([found.get(name, [0.0] * len(_PARTS)) for name in layers], dtype=torch.float64)
    agreed = distributed.largest(torch.nan_to_num(differences, nan=float("inf")))
    allowed = _ROUNDING[number_format(assembly.compiled, assembly.device)]
    wrong = (agreed > allowed).nonzero().tolist()
    if wrong:
        layer, part = wrong[0]
        raise ConfigError(
            f"expert_parallel_size={size}: in {list(layers)[layer]} the {_PARTS[part]} differ by a relative "
            f"{agreed[layer, part]:.2g} from those of whole experts (rounding allows {allowed:.0e}), and so they would "
            "in training. Set expert_parallel_size=1."
        )
    if distributed.rank() == 0:
        worst = ", ".join(f"{part} {value:.1e}" for part, value in zip(_PARTS, agreed.amax(0).tolist(), strict=True))
        logger.info(
            "expert_parallel_size: %d layers equal whole experts on the first batch; largest differences: %s.",
            len(layers),
            worst,
            extra={CHECK: "experts"},
        )


@contextmanager
def _comparing(layers: Mapping[str, Any]) -> Iterator[dict[str, list[float]]]:
    """Inside, each layer that runs is compared with whole experts; the differences by name of the layer."""
    found: dict[str, list[float]] = {}
    exchanges = {name: vars(module)[EXCHANGE] for name, module in layers.items()}
    for name, module in layers.items():
        vars(module)[EXCHANGE] = _Compared(name, exchanges[name], found)
    try:
        yield found
    finally:
        for name, module in layers.items():
            vars(module)[EXCHANGE] = exchanges[name]


class _Compared:
    """Takes the place of an exchange; a layer that runs twice keeps its larger differences."""

    def __init__(self, name: str, exchange: Any, found: dict[str, list[float]]) -> None:
        self._name = name
        self._exchange = exchange
        self._found = found

    def __call__(
        self, module: nn.Module, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        # With adapters, peft makes a property of a weight that adds them, and the parameter is that of a child.
        names = [name for name, parameter in module.named_parameters() if expert_slice(parameter) is not None]
        names = [name.removeprefix("parametrizations.").removesuffix(".original") for name in names]
        own = {name: getattr(module, name).detach() for name in names}
        result, *gradients = _with_gradients(self._exchange, module, hidden, experts, weights, own)
        wanted = _of_whole_experts(self._exchange.group, module, hidden, experts, weights, own)
        pairs = list(zip([result, *gradients], wanted, strict=True))
        worst = [largest_row_difference(value, expected) for value, expected in pairs]
        parts = [*worst[:3], max(worst[3:])]
        self._found[self._name] = [*map(max, parts, self._found.get(self._name, parts))]
        return result


def _with_gradients(
    compute: Experts,
    module: nn.Module,
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    own: Mapping[str, torch.Tensor],
) -> list[torch.Tensor]:
    """The results with the weights ``own``, and the gradients of the tokens, the routing weights and of ``own``."""
    leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weights, *own.values())]
    with torch.enable_grad():
        result = compute(_WithWeights(module, zip(own, leaves[2:], strict=True)), leaves[0], experts, leaves[1])
        result = result + 0 * leaves[0].sum()  # which no loop touches that has no token
        gradients = torch.autograd.grad(result, leaves, _direction(result), allow_unused=True)
    filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    return [result.detach(), *filled]


class _WithWeights:
    """A module of experts with other weights.

    Its activations run without hooks: at ZeRO 3 ranks must run the same modules, and a loop has only the experts that
    some token of its rank has chosen.
    """

    def __init__(self, module: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        vars(self).update(weights)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, nn.Module) and not any(True for _ in value.parameters()):
            return value.forward
        if isinstance(value, MethodType) and value.__self__ is self._module:
            return MethodType(value.__func__, self)
        return value


def _direction(result: torch.Tensor) -> torch.Tensor:
    """The same for both ways: random signs of each feature."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (result.shape[-1],), generator=generator) * 2 - 1
    return signs.to(result).expand_as(result)


def _of_whole_experts(
    group: dist.ProcessGroup,
    module: Any,
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    own: Mapping[str, torch.Tensor],
) -> list[torch.Tensor]:
    """The same as :func:`_with_gradients` by the loop of the class. Collective in ``group``."""
    loop = _loop_of(module)
    k = experts.shape[1]
    total = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (hidden, hidden, weights)]
    of_own: list[torch.Tensor] = []
    (first, *_) = filter(None, map(expert_slice, module.parameters()))
    starts = torch.empty(group.size(), dtype=torch.int64, device=hidden.device)
    dist.all_gather_into_tensor(starts, starts.new_tensor([first.bands[0][0]]), group=group)
    for rank, start in enumerate(starts.tolist()):
        part = {name: tensor.clone() for name, tensor in own.items()}
        for tensor in part.values():
            dist.broadcast(tensor, group=group, group_src=rank)
        local = experts.flatten() - start
        chosen = ((local >= 0) & (local < module.num_experts)).nonzero().flatten()
        tokens, ids = chosen // k, local[chosen][:, None]
        found = _with_gradients(loop, module, hidden[tokens], ids, weights.flatten()[chosen][:, None], part)
        total[0].index_add_(0, tokens, found[0].float())
        total[1].index_add_(0, tokens, found[1].float())
        total[2].view(-1).index_add_(0, chosen, found[2].flatten().float())
        gradients = [gradient.float() for gradient in found[3:]]
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        if rank == group.rank():
            of_own = gradients
    return [*total, *of_own]


def _loop_of(module: nn.Module) -> Experts:
    """The computation that the class itself defines, which transformers' decorator wraps."""
    function: Experts = getattr(type(module).forward, "__wrapped__", type(module).forward)
    return function

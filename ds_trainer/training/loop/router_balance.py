"""The load-balancing loss of routers over the tokens of several ranks.

transformers computes ``E * sum_e f_e * P_e`` from the tokens of a rank: of ``E`` experts, ``f_e`` is how often expert
``e`` was chosen, divided by the tokens, and ``P_e`` its mean probability. The term of a batch is not the mean of the
terms of its parts. So both sums and the tokens are added up over the ranks that hold a sequence together, and the term
is that of one process with whole sequences; with ``global_router_aux_loss`` over the ranks of all replicas.

Each rank gets the same term, and counts it with its share of the targets: the sum over ranks is right, and so is the
gradient, because the sums over ranks have a gradient: that of all ranks' shares.

Source: Fedus et al. 2021, "Switch Transformers", section 2.2; Qiu et al. 2025, "Demons in the Detail", for the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.nn.functional import all_reduce  # its gradient is the sum of those of all ranks

from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = get_logger(__name__)

_NAME = "load_balancing_loss_func"
_TOLERANCE = 1e-4  # between the formula and the model's own function, in the dtype of the probabilities' sums: float32


class RouterBalance:
    """Computes the load-balancing loss of a model in the place of its own function.

    Args:
        spaces: the global names of the modules whose ``forward`` calls the function.
        layout: the layout of the job.
        everywhere: whether micro-batches of all replicas are counted together in the training; otherwise the shards of
            a sequence are.
    """

    def __init__(self, spaces: list[dict[str, Any]], layout: ParallelLayout, everywhere: bool) -> None:
        self._spaces = spaces
        self._owns = [space[_NAME] for space in spaces]
        self._own = self._owns[0]
        self._layout = layout
        self._everywhere = everywhere
        self._group: ProcessGroup | None = None
        self._counts = True
        self._known: bool | None = None  # whether the formula is that of the model; None: not compared

    @contextmanager
    def over_ranks(self, sharded: bool, is_dummy: bool) -> Iterator[None]:
        """Context of a micro-batch, which all ranks of the group enter.

        Args:
            sharded: whether each rank has a shard of the sequences.
            is_dummy: whether the micro-batch of the training is a dummy, whose tokens do not count.
        """
        everywhere = self._everywhere and torch.is_grad_enabled() and sharded == (self._layout.cp * self._layout.sp > 1)
        if not (everywhere or sharded):
            yield
            return
        groups = parallel_groups(self._layout)
        self._group = groups.seq_data_parallel if everywhere else groups.sequence
        self._counts = not (everywhere and is_dummy)
        for space in self._spaces:
            space[_NAME] = self._term
        try:
            yield
        finally:
            for space, own in zip(self._spaces, self._owns, strict=True):
                space[_NAME] = own

    @torch.compiler.disable
    def _term(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        if not isinstance(gate_logits, tuple) or not gate_logits:
            return self._own(gate_logits, num_experts, top_k, attention_mask)
        if attention_mask is not None:  # the mean over no token is nan, and so is its gradient
            attention_mask = attention_mask.to(gate_logits[0].device)
            some = torch.where(attention_mask.any(), attention_mask, torch.ones_like(attention_mask))
        else:
            some = None
        if self._known is None:
            self._compare(gate_logits, num_experts, top_k, some)
        if not self._known:
            return self._own(gate_logits, num_experts, top_k, some)
        assert self._group is not None  # inside of over_ranks
        sums = _sums(gate_logits, top_k, attention_mask) * self._counts
        return _term_of(all_reduce(sums, group=self._group))

    def _compare(self, gate_logits: tuple[torch.Tensor, ...], *arguments: Any) -> None:
        """Compare the formula with the function of the model on this rank's tokens. Collective, once; waits."""
        with torch.no_grad():
            term = _term_of(_sums(gate_logits, *arguments[1:]))
            differs = ~torch.isclose(term, self._own(gate_logits, *arguments).to(term), rtol=_TOLERANCE)
            distributed.all_reduce_sum(differs := differs.float(), group=self._group)
        self._known = not bool(differs)
        if self._known:
            return
        what = f"{_NAME} of {self._own.__module__} computes another term than E * sum(f * P)"
        if self._everywhere:
            raise ConfigError(f"global_router_aux_loss=True, but {what}. Set global_router_aux_loss=False.")
        logger.warning("%s: it is computed from the shard of each rank, and depends on the sizes of shards.", what)


def _sums(gate_logits: tuple[torch.Tensor, ...], top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Of all layers' tokens: by expert how often it was chosen, the sums of probabilities; the number of tokens."""
    experts = gate_logits[0].shape[-1]
    total = torch.zeros(2 * experts + 1, device=gate_logits[0].device)
    for logits in gate_logits:
        probabilities = logits.to(total.device).flatten(0, -2).softmax(-1)
        chosen = torch.zeros_like(probabilities, dtype=torch.float32)
        chosen.scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
        rows = torch.cat([chosen, probabilities.float(), chosen.new_ones(len(chosen), 1)], 1)
        total = total + (rows if mask is None else rows * mask.reshape(-1, 1).float()).sum(0)
    return total


def _term_of(sums: torch.Tensor) -> torch.Tensor:
    experts = len(sums) // 2
    chosen, probabilities, tokens = sums.split([experts, experts, 1])
    return experts * (chosen * probabilities).sum() / tokens.squeeze().clamp(min=1).square()


def router_balance_of(model: Any, layout: ParallelLayout, everywhere: bool) -> RouterBalance | None:
    """The load-balancing loss over ranks; None if each rank computes its own.

    Args:
        model: the innermost model.
        layout: the layout of the job.
        everywhere: ``global_router_aux_loss``.

    Raises:
        ConfigError: ``global_router_aux_loss`` with a model that computes no such loss.
    """
    spaces = list(_spaces(type(model)))
    config = getattr(model, "config", None)
    on = bool(getattr(getattr(config, "get_text_config", lambda: config)(), "output_router_logits", False))
    if everywhere and not (spaces and on):
        why = f"does not call transformers' {_NAME}" if not spaces else "has output_router_logits=False in its config"
        cure = "or output_router_logits=True in the config of the model" if spaces else "or train a mixture of experts"
        raise ConfigError(
            f"global_router_aux_loss=True, but {type(model).__name__} {why}: it has no load-balancing loss. "
            f"Set global_router_aux_loss=False, {cure}."
        )
    return RouterBalance(spaces, layout, everywhere) if spaces and layout.world_size > 1 else None


def _spaces(kind: type) -> Iterator[dict[str, Any]]:
    """Global names of the ``forward`` methods of a class that call the function."""
    for base in kind.__mro__:
        forward = inspect.unwrap(vars(base).get("forward", kind))
        space = getattr(forward, "__globals__", {})
        function = space.get(_NAME)
        if function is not None and next(iter(inspect.signature(function).parameters), None) == "gate_logits":
            yield space

"""Divides the experts of a model among ranks: each keeps a part of the stacked weights, and tokens travel.

Only the function that computes the experts is replaced, by the interface of transformers (``ALL_EXPERTS_FUNCTIONS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.expert_parallel import is_expert, mark_experts
from ds_trainer.parallel.expert_exchange import (
    ExpertExchange,
    forget_padding,
    keep_routes,
    note_padding,
    without_padding,
)
from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.devices import free_bytes
from ds_trainer.utils.errors import ConfigError

IMPLEMENTATION = "ds_trainer_expert_parallel"
"""The name under which transformers finds the function."""

EXCHANGE = "ds_trainer_exchange"
"""Attribute of a module of experts."""
_FUNCTION = "_gradient_checkpointing_func"  # of transformers' layers
_KEEPS = "ds_trainer_keeps_routes"
_NONE = (
    "expert_parallel_size={size}, but {model} has no experts that can be divided: modules with stacked weights "
    "[experts, ...] whose function transformers lets be replaced, or own ones with divides_experts=True. Set "
    "expert_parallel_size=1."
)
_UNEVEN = "expert_parallel_size={size} does not divide the {experts} experts of {name}. Set it to {sizes}."
_ADAPTED = (
    "expert_parallel_size={size}: {name} has adapters that cannot be divided with its experts. Use LoRA with "
    "target_parameters that have a dimension for each of experts, inputs and outputs, or set expert_parallel_size=1."
)
_MUON = (
    "expert_parallel_size={size} and optim=muon: {name} has matrices with rows of all experts (biases or LoRA), whose "
    "update depends on the whole. Freeze them, set optim=adamw_torch, or expert_parallel_size=1."
)
_BYPASSED = (
    "expert_parallel_size: {name} has run without sending tokens to the ranks that hold their experts, so something "
    "has replaced its forward, such as use_liger_kernel=True. Remove that, or set expert_parallel_size=1."
)


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of ``model`` that hold stacked weights of experts, by name: those of transformers, and own ones.

    Own ones have ``divides_experts = True``, ``num_experts``, parameters ``[num_experts, ...]`` and a
    ``forward(tokens [n, hidden], experts [n, k], weights [n, k]) -> [n, hidden]``: the sum over the experts of each
    token, of their result times the weight.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts")  # and is no wrapper of peft's modules_to_save, which has those of its module
        and ("_is_expert_parallel" in vars(module) or _own(module, "divides_experts"))
    }


def _own(module: nn.Module, name: str) -> Any:
    return vars(module).get(name, getattr(type(module), name, None))


def divided_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of ``model`` whose experts are divided, by name."""
    return {name: module for name, module in model.named_modules() if EXCHANGE in vars(module)}


def expert_problems(model: nn.Module, size: int, ranks: int = 0, optimizer: str | None = None) -> list[str]:
    """Reasons why the experts of ``model`` cannot be divided by ``size`` of ``ranks`` ranks, one sentence each.

    ``optimizer`` is DeepSpeed's type.
    """
    if any(is_expert(parameter) for parameter in model.parameters()):
        return []  # they are divided
    layers = expert_layers(model)
    if not layers:
        return [_NONE.format(size=size, model=type(model).__name__)]
    for name, module in layers.items():
        experts = module.num_experts
        if experts % size:
            sizes = " or ".join(str(n) for n in range(1, experts + 1) if experts % n == ranks % n == 0)
            return [_UNEVEN.format(size=size, experts=experts, name=name, sizes=sizes)]
        if any(getattr(w, "num_experts", 0) != experts or not hasattr(w, "lora_A") for w in _wrappers(model, name)):
            return [_ADAPTED.format(size=size, name=name)]
        matrices = any(weight.dim() == 2 and weight.requires_grad for weight in module.parameters(recurse=False))
        if (optimizer or "").lower() == "muon" and (matrices or [*_wrappers(model, name)]):  # stacked weights are apart
            return [_MUON.format(size=size, name=name)]
    return []


def _wrappers(model: nn.Module, name: str) -> Iterator[Any]:
    """The modules of peft around the layer ``name``: one for each of its parameters that has adapters."""
    while name.endswith(".base_layer"):
        name = name.rpartition(".")[0]
        yield model.get_submodule(name)


def divide_experts(model: nn.Module, groups: ParallelGroups) -> None:
    """Leaves this rank its experts of ``model``, and lets it exchange tokens with the others. Once for each model.

    Raises:
        ConfigError: the model has no such experts, or their number cannot be divided.
    """
    size = groups.layout.ep
    for module in model.modules():
        if _FUNCTION in vars(module) and not hasattr(vars(module)[_FUNCTION], _KEEPS):
            kept = keep_routes(vars(module)[_FUNCTION])
            setattr(kept, _KEEPS, True)
            setattr(module, _FUNCTION, kept)
    if any(is_expert(parameter) for parameter in model.parameters()):
        return
    if problems := expert_problems(model, size, groups.layout.seq_data_parallel_size):
        raise ConfigError(problems)
    _watch_padding(model)
    layers, free = expert_layers(model), cache(free_bytes)  # asked once, beside the weights
    own = {name for name, module in layers.items() if not hasattr(module, "_is_expert_parallel")}
    configs = {id(module.config): module.config for name, module in layers.items() if name not in own}
    products = {key: _product(config) for key, config in configs.items()}
    for name, module in layers.items():
        for wrapper in _wrappers(model, name):
            _divide_adapters(wrapper, groups)
        _divide(name, module, groups, type(module).forward if name in own else products[id(module.config)], free)
        if name in own and "forward" not in vars(module):
            module.forward = partial(_exchanged, module)


def _watch_padding(model: nn.Module) -> None:
    model.register_forward_pre_hook(note_padding, with_kwargs=True)
    model.register_forward_hook(forget_padding, always_call=True)


def _product(config: Any) -> Callable[..., Any]:
    """The function that computes the experts of a model; grouped products in the place of its own loop."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    chosen = config._experts_implementation
    known = chosen in ALL_EXPERTS_FUNCTIONS and chosen != IMPLEMENTATION  # as another model of this configuration set
    product: Callable[..., Any] = ALL_EXPERTS_FUNCTIONS.get(chosen if known else "grouped_mm")
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = _exchanged
    config._experts_implementation = IMPLEMENTATION
    return product


def _divide(name: str, module: Any, groups: ParallelGroups, product: Callable[..., Any], free: Any) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.shape[:1] == (module.num_experts,):
            mark_experts(parameter, groups)
    module.num_experts //= groups.layout.ep
    exchange = ExpertExchange(name, groups.experts, module.num_experts, product, free)
    # Not a child of the module: it is no part of the model.
    object.__setattr__(module, EXCHANGE, exchange)

    @torch.compiler.disable
    def check(*_: Any) -> None:
        if not exchange.calls:
            raise ConfigError(_BYPASSED.format(name=name))

    module.register_forward_hook(check)


def _divide_adapters(wrapper: Any, groups: ParallelGroups) -> None:
    """Divides the factors of peft's LoRA of a stacked weight: A is ``[experts x r, in]``, B ``[out, r x experts]``."""
    for adapter, factor in wrapper.lora_A.items():
        mark_experts(factor.weight, groups)
        mark_experts(wrapper.lora_B[adapter].weight, groups, dim=1, repeats=wrapper.r[adapter])
    wrapper.num_experts //= groups.layout.ep
    if wrapper.num_experts == 1:  # peft (0.21) then takes the weight for that of a linear layer, [out, in]
        wrapper.fan_in_fan_out = wrapper.get_base_layer().is_transposed


@torch.compiler.disable
def _exchanged(module: Any, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    exchange: ExpertExchange | None = getattr(module, EXCHANGE, None)
    if exchange is None:  # another model with this configuration
        from transformers.integrations.moe import grouped_mm_experts_forward

        product: Callable[..., torch.Tensor] = grouped_mm_experts_forward
        return product(module, hidden, experts, weights)
    return exchange(module, hidden, experts, weights)


_BIAS, _TOKENS, _OWNER = "e_score_correction_bias", "ds_trainer_tokens", "ds_trainer_gate_biases"


class GateBiases:
    """Balances experts without an auxiliary loss, by the biases with which their gate chooses them (DeepSeek-V3).

    After each update of the weights, the bias of an expert with fewer tokens than the mean of its layer rises by the
    rate, and that of one with more falls. Counted are the tokens of the step over all ranks, without padding. Counts
    are buffers, so that passes that are measured, or run again, do not change them.

    Args:
        model: the model of an engine.
        layout: the layout of the job.
        rate: the change of a bias.

    Attributes:
        counts: whether a forward pass counts.

    Raises:
        ConfigError: no gate has a bias in float32.
    """

    def __init__(self, model: nn.Module, layout: ParallelLayout, rate: float) -> None:
        self.counts = True
        self._rate = rate
        self._group = parallel_groups(layout).seq_data_parallel
        self._layers: list[tuple[nn.Module, nn.Module]] = []  # the experts, and what has the bias
        for name, module in expert_layers(model).items():
            block = model.get_submodule(name.replace(".base_layer", "").rpartition(".")[0])
            gates = [gate for gate in block.modules() if gate._buffers.get(_BIAS) is not None]
            if len(gates) != 1 or gates[0]._buffers[_BIAS].dtype != torch.float32:  # type: ignore[union-attr]
                continue
            if _TOKENS not in module._buffers:
                _watch_padding(model)
                module.register_forward_pre_hook(_count_tokens)
            object.__setattr__(module, _OWNER, self)  # of this training
            empty = torch.zeros_like(gates[0]._buffers[_BIAS], dtype=torch.int64)  # type: ignore[arg-type]
            module.register_buffer(_TOKENS, empty, persistent=False)
            self._layers.append((module, gates[0]))
        if not self._layers:
            raise ConfigError(
                f"optim_args: gate_bias_rate={rate}, but no gate of {type(model).__name__} has a buffer {_BIAS} in "
                "float32 that chooses among stacked experts. Remove gate_bias_rate."
            )

    def begin_micro_batch(self, index: int, is_dummy: bool) -> None:
        """Before the ``index``-th micro-batch of a step; the first one forgets what was counted before."""
        self.counts = not is_dummy
        for experts, _ in self._layers if index == 0 else ():
            experts._buffers[_TOKENS].zero_()  # type: ignore[union-attr]

    @torch.no_grad()
    def update(self) -> None:
        """After a step that has changed the weights. Collective."""
        tokens: Any = [experts._buffers[_TOKENS] for experts, _ in self._layers]
        flat = torch.cat(tokens)
        distributed.all_reduce_sum(flat, group=self._group)
        for (_, gate), load in zip(self._layers, flat.split([len(one) for one in tokens]), strict=True):
            gate._buffers[_BIAS] += self._rate * (load.sum() - load * len(load)).sign()


@torch.compiler.disable
def _count_tokens(module: Any, args: tuple[Any, ...]) -> None:
    # Within a backward pass a layer runs again.
    if module.training and vars(module)[_OWNER].counts and torch._C._current_graph_task_id() == -1:
        tokens = module._buffers[_TOKENS]
        tokens += without_padding(args[1].detach(), len(tokens))[1]


_LOADS = ("entropy", "busiest_share", "dead", "exchange_seconds")


def expert_log(model: nn.Module, layout: ParallelLayout, steps: int, device: torch.device) -> dict[str, float]:
    """The loads of experts since the last call, by log key. Collective.

    Over all ranks that see different tokens: entropy of a layer's load, 1 if all experts get as many tokens; the share
    that the busiest expert gets; experts that get none. Without a layer in the name, the worst of all layers, and the
    sum of dead experts. ``expert_exchange_gb`` is what this rank sends to others in a step, in 10^9 bytes, and the
    seconds of exchanges are those of this rank in a step, with its waits for others.

    Args:
        model: the model.
        layout: the layout of the job.
        steps: optimizer steps since the last call.
        device: the device of this rank.
    """
    exchanges = {name: vars(module)[EXCHANGE] for name, module in divided_layers(model).items()}
    loads = [exchange.take_load(device) for exchange in exchanges.values()]
    flat = torch.cat(loads)
    distributed.all_reduce_sum(flat, group=parallel_groups(layout).seq_data_parallel)
    sent = sum(exchange.take_bytes_sent() for exchange in exchanges.values())
    seconds = {name: exchange.take_seconds() / steps for name, exchange in exchanges.items()}
    found: dict[str, float] = {}
    worst = [1.0, 0.0, 0]
    for name, load in zip(exchanges, flat.double().cpu().split([len(load) for load in loads]), strict=True):
        if not load.any():  # not run: the original of a copy that adapters train
            continue
        share = load / load.sum()
        entropy = float(torch.special.entr(share).sum() / max(torch.tensor(len(load)).double().log(), 1e-30))
        busiest, dead = float(share.max()), int((load == 0).sum())
        values = (entropy, busiest, dead, seconds[name])
        found |= {f"experts/{name}/{key}": value for key, value in zip(_LOADS, values, strict=True)}
        worst = [min(worst[0], entropy), max(worst[1], busiest), worst[2] + dead]
    totals = {"expert_load_entropy": worst[0], "expert_busiest_share": worst[1], "dead_experts": float(worst[2])}
    sums = {"expert_exchange_gb": sent / 1e9 / steps, "expert_exchange_seconds": sum(seconds.values())}
    return {**totals, **sums, **found}

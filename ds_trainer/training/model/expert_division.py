"""Divides the experts of a model among ranks: each keeps a part of the stacked weights, and tokens travel.

Only the function that computes the experts is replaced, by the interface of transformers (``ALL_EXPERTS_FUNCTIONS``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.expert_parallel import is_expert, mark_experts
from ds_trainer.parallel.expert_exchange import ExpertExchange, forget_padding, keep_routes, note_padding
from ds_trainer.parallel.groups import ParallelGroups, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

IMPLEMENTATION = "ds_trainer_expert_parallel"
"""The name under which transformers finds the function."""

EXCHANGE = "ds_trainer_exchange"
"""Attribute of a module of experts."""
_FUNCTION = "_gradient_checkpointing_func"  # of transformers' layers
_KEEPS = "ds_trainer_keeps_routes"
_NONE = (
    "expert_parallel_size={size}, but {model} has no experts that can be divided: modules with stacked weights "
    "[experts, ...] whose function transformers lets be replaced. Set expert_parallel_size=1."
)
_UNEVEN = "expert_parallel_size={size} does not divide the {experts} experts of {name}. Set it to {sizes}."
_ADAPTED = (
    "expert_parallel_size={size}: {name} is wrapped by an adapter library, and only the model's own experts are "
    "divided. Apply adapters to other layers, or set expert_parallel_size=1."
)
_BYPASSED = (
    "expert_parallel_size: {name} has run without sending tokens to the ranks that hold their experts, so something "
    "has replaced its forward, such as use_liger_kernel=True. Remove that, or set expert_parallel_size=1."
)


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of ``model`` that hold stacked weights of experts, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    }


def divided_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of ``model`` whose experts are divided, by name."""
    return {name: module for name, module in model.named_modules() if EXCHANGE in vars(module)}


def expert_problems(model: nn.Module, size: int) -> list[str]:
    """Reasons why the experts of ``model`` cannot be divided by ``size`` ranks, one sentence each."""
    if any(is_expert(parameter) for parameter in model.parameters()):
        return []  # they are divided
    layers = expert_layers(model)
    if not layers:
        return [_NONE.format(size=size, model=type(model).__name__)]
    for name, module in layers.items():
        experts = module.num_experts
        if experts % size:
            sizes = " or ".join(str(number) for number in range(1, experts + 1) if experts % number == 0)
            return [_UNEVEN.format(size=size, experts=experts, name=name, sizes=sizes)]
        parent = model.get_submodule(name.rpartition(".")[0])
        if hasattr(parent, "base_layer"):
            return [_ADAPTED.format(size=size, name=name)]
    return []


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
    if problems := expert_problems(model, size):
        raise ConfigError(problems)
    model.register_forward_pre_hook(note_padding, with_kwargs=True)
    model.register_forward_hook(forget_padding, always_call=True)
    layers = expert_layers(model)
    configs = {id(module.config): module.config for module in layers.values()}
    products = {key: _product(config) for key, config in configs.items()}
    for name, module in layers.items():
        _divide(name, module, groups, products[id(module.config)])


def _product(config: Any) -> Callable[..., Any]:
    """The function that computes the experts of a model; grouped products in the place of its own loop."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    chosen = config._experts_implementation
    known = chosen in ALL_EXPERTS_FUNCTIONS and chosen != IMPLEMENTATION  # as another model of this configuration set
    product: Callable[..., Any] = ALL_EXPERTS_FUNCTIONS.get(chosen if known else "grouped_mm")
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = _exchanged
    config._experts_implementation = IMPLEMENTATION
    return product


def _divide(name: str, module: Any, groups: ParallelGroups, product: Callable[..., Any]) -> None:
    experts = module.num_experts
    for parameter in module.parameters(recurse=False):
        if parameter.shape[:1] == (experts,):
            mark_experts(parameter, experts, groups)
    module.num_experts = experts // groups.layout.ep
    exchange = ExpertExchange(name, groups.experts, module.num_experts, product)
    # Not a child of the module: it is no part of the model.
    object.__setattr__(module, EXCHANGE, exchange)

    def check(*_: Any) -> None:
        if not exchange.calls:
            raise ConfigError(_BYPASSED.format(name=name))

    module.register_forward_hook(check)


def _exchanged(module: Any, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    exchange: ExpertExchange | None = getattr(module, EXCHANGE, None)
    if exchange is None:  # another model with this configuration
        from transformers.integrations.moe import grouped_mm_experts_forward

        product: Callable[..., torch.Tensor] = grouped_mm_experts_forward
        return product(module, hidden, experts, weights)
    return exchange(module, hidden, experts, weights)


_LOADS = ("entropy", "busiest_share", "dead")


def expert_log(model: nn.Module, layout: ParallelLayout, steps: int, device: torch.device) -> dict[str, float]:
    """The loads of experts since the last call, by log key. Collective.

    Over all ranks that see different tokens: entropy of a layer's load, 1 if all experts get as many tokens; the share
    that the busiest expert gets; experts that get none. Without a layer in the name, the worst of all layers, and the
    sum of dead experts. ``expert_exchange_gb`` is what this rank sends to others in a step, in 10^9 bytes.

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
    found: dict[str, float] = {}
    worst = [1.0, 0.0, 0]
    for name, load in zip(exchanges, flat.double().cpu().split([len(load) for load in loads]), strict=True):
        share = load / load.sum().clamp(min=1)
        entropy = float(torch.special.entr(share).sum() / max(torch.tensor(len(load)).double().log(), 1e-30))
        busiest, dead = float(share.max()), int((load == 0).sum())
        found |= {f"experts/{name}/{key}": value for key, value in zip(_LOADS, (entropy, busiest, dead), strict=True)}
        worst = [min(worst[0], entropy), max(worst[1], busiest), worst[2] + dead]
    totals = {"expert_load_entropy": worst[0], "expert_busiest_share": worst[1], "dead_experts": float(worst[2])}
    return {**totals, "expert_exchange_gb": sent / 1e9 / steps, **found}

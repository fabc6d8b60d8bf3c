"""Expert parallelism: the ranks that see different tokens hold different experts of a mixture.

Of a model of transformers only the function that computes its experts is replaced (``ALL_EXPERTS_FUNCTIONS``): router,
shared experts, names and auxiliary losses stay its own. The stacked weights of the experts, ``[experts, ...]``, are
divided along their first dimension. DeepSpeed (0.19.8) knows by the marks of its own mixtures that such a weight is
replicated over some of the ranks only, and reduces, shards and broadcasts it there; gradients are divided by the number of
all ranks at every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, all_gather_into_tensor

from ds_trainer.parallel.expert_exchange import ExpertExchange
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError

IMPLEMENTATION = "ds_trainer_expert_parallel"
"""The name under which transformers finds the function."""

_GROUP = "ds_trainer_experts"
_SLICE = "ds_trainer_expert_slice"
_EXCHANGE = "ds_trainer_exchange"
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")  # of the schedules of torch
_DIVIDED_FROM = "ds_trainer_divided_from"  # a key of a parameter group: the index of the other part
EXPERT_MARKS = ("moe", "name", _DIVIDED_FROM)
"""Keys that are set in parameter groups of experts, two of them for DeepSpeed."""
_NONE = (
    "expert_parallel_size={size}, but {model} has no experts that can be divided: modules with stacked weights "
    "[experts, ...] whose function transformers lets be replaced. Set expert_parallel_size to 1."
)
_UNEVEN = "expert_parallel_size={size} does not divide the {experts} experts of {name}. Set it to {sizes}."


def expert_slice(parameter: torch.Tensor) -> ShardSlice | None:
    """The slice of a stacked weight of experts that this rank holds; None for any other parameter."""
    return getattr(parameter, _SLICE, None)


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a part of the experts of ``parameter``."""
    return hasattr(parameter, _SLICE)


def all_experts(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """The stacked weight ``parameter`` with all experts, of which this rank has ``part``. Collective over their ranks."""
    whole = part.new_empty(getattr(parameter, _SLICE).shape)
    all_gather_into_tensor(whole, part.contiguous(), group=parameter.ds_trainer_expert_ranks)
    return whole


def weight_group(parameter: torch.Tensor, groups: ParallelGroups) -> ProcessGroup:
    """The ranks that hold the same elements of ``parameter``, or its shards."""
    return groups.expert_replicas if is_expert(parameter) else groups.seq_data_parallel


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of ``model`` that hold stacked weights of experts, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}


def divide_experts(model: nn.Module, groups: ParallelGroups) -> None:
    """Leaves this rank its experts of ``model``, and lets it exchange tokens with the others. Once for each model.

    Raises:
        ConfigError: the model has no such experts, or their number cannot be divided.
    """
    size = groups.layout.ep
    if size == 1 or any(is_expert(parameter) for parameter in model.parameters()):
        return
    layers = expert_layers(model)
    if not layers:
        raise ConfigError(_NONE.format(size=size, model=type(model).__name__))
    for name, module in layers.items():
        experts = module.num_experts
        if experts % size:
            sizes = " or ".join(str(number) for number in range(1, experts + 1) if experts % number == 0)
            raise ConfigError(_UNEVEN.format(size=size, experts=experts, name=name, sizes=sizes))
    configs = {id(module.config): module.config for module in layers.values()}
    products = {key: _product(config) for key, config in configs.items()}
    for name, module in layers.items():
        _divide(name, module, groups, products[id(module.config)])


def _product(config: Any) -> Callable[..., Any]:
    """The function that computes the experts of a model; grouped products in the place of its own loop."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    chosen = config._experts_implementation
    product: Callable[..., Any] = ALL_EXPERTS_FUNCTIONS.get(chosen if chosen in ALL_EXPERTS_FUNCTIONS else "grouped_mm")
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = _exchanged
    config._experts_implementation = IMPLEMENTATION
    return product


def _divide(name: str, module: Any, groups: ParallelGroups, product: Callable[..., Any]) -> None:
    experts, rank = module.num_experts, groups.experts.rank()
    local = experts // groups.layout.ep
    for parameter in module.parameters(recurse=False):
        shape = tuple(parameter.shape)
        if shape[:1] != (experts,):
            continue
        part = ShardSlice(shape, 0, 0, 0, ((rank * local, local),))
        setattr(parameter, _SLICE, part.run(0, part.slice_numel))
        parameter.data = parameter.data[rank * local : (rank + 1) * local].clone()
        # DeepSpeed's marks: replicated over the ranks of a group of this name only, and not over all.
        parameter.allreduce = False
        parameter.group_name = parameter.ds_zero_partition_group_name = _GROUP
        parameter.ds_zero_placement_family = "autoep_expert"
        parameter.ds_zero_partition_process_group = groups.expert_replicas
        parameter.ds_trainer_expert_ranks = groups.experts
    exchange = ExpertExchange(name, groups.experts, local, product)
    object.__setattr__(module, _EXCHANGE, exchange)
    module.num_experts = local


def _exchanged(module: Any, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    exchange: ExpertExchange = getattr(module, _EXCHANGE)
    return exchange(module, hidden, experts, weights)


def separate_experts(groups: list[dict[str, Any]], schedule: Any = None) -> None:
    """Divides each parameter group of ``groups`` that has experts and other parameters, in place.

    DeepSpeed shards a group of parameters over one group of ranks.

    Args:
        groups: of an optimizer.
        schedule: of that optimizer, which keeps a value for each group; None if there is none yet.
    """
    for index, group in enumerate(list(groups)):
        experts = [parameter for parameter in group["params"] if is_expert(parameter)]
        if not experts:
            continue
        rest = [parameter for parameter in group["params"] if not is_expert(parameter)]
        marks = {"moe": True, "name": _GROUP}
        if rest:
            group["params"] = rest
            groups.append({**group, "params": experts, **marks, _DIVIDED_FROM: index})
            for name in _BY_GROUP:
                if isinstance(values := getattr(schedule, name, None), list):
                    values.append(values[index])
        else:
            group.update(marks)


def of_whole_groups(values: Sequence[Any], groups: list[dict[str, Any]]) -> list[Any]:
    """``values``, one for each of ``groups``, without those of the groups that :func:`separate_experts` has added.

    So a checkpoint does not depend on the number of ranks that divide the experts.
    """
    return [value for value, group in zip(values, groups, strict=True) if _DIVIDED_FROM not in group]


def of_divided_groups(values: Sequence[Any], groups: list[dict[str, Any]]) -> list[Any]:
    """The inverse of :func:`of_whole_groups`: an added group has the value of the group that it was taken from."""
    return [*values, *(values[group[_DIVIDED_FROM]] for group in groups if _DIVIDED_FROM in group)]


def schedule_state(state: Any, groups: list[dict[str, Any]], convert: Callable[..., list[Any]]) -> Any:
    """The ``state_dict`` of a schedule with its values for each parameter group converted."""
    if isinstance(state, dict):
        changed = {key: schedule_state(value, groups, convert) for key, value in state.items()}
        return {k: convert(v, groups) if k in _BY_GROUP and isinstance(v, list) else v for k, v in changed.items()}
    return [schedule_state(one, groups, convert) for one in state] if isinstance(state, list) else state


@contextmanager
def declared_experts(model: nn.Module, groups: ParallelGroups, stage: int) -> Iterator[None]:
    """Inside, an engine is created that knows the groups of the experts of ``model``."""
    if not any(is_expert(parameter) for parameter in model.parameters()):
        yield
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups as library

    library._EXPERT_PARALLEL_GROUP[_GROUP] = groups.experts
    library._EXPERT_DATA_PARALLEL_GROUP[_GROUP] = groups.expert_replicas
    original = DeepSpeedEngine._configure_distributed_model

    def configure(engine: Any, module: nn.Module) -> None:
        engine.has_moe_layers = stage < 3  # at stage 3 the marks are enough, and it asks for layers of its own
        original(engine, module)

    DeepSpeedEngine._configure_distributed_model = configure
    try:
        yield
    finally:
        DeepSpeedEngine._configure_distributed_model = original


def exchanges(model: nn.Module) -> list[ExpertExchange]:
    """What the layers of ``model`` exchange tokens with."""
    return [getattr(module, _EXCHANGE) for module in model.modules() if hasattr(module, _EXCHANGE)]

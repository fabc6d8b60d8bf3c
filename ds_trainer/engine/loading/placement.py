"""How the weights of a model reach the device, in the one moment when DeepSpeed has cut the model and not moved it yet.

DeepSpeed 0.19.8 makes an engine in this order (``runtime/engine.py``): tensor-parallel layers are cut, the module is
cast, moved to the device and broadcast (``_configure_distributed_model``), the optimizer is built and ZeRO shards. What
is done here comes before the second of these steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.engine.loading.sharding import Sharder, unshard
from ds_trainer.engine.loading.tensors import (
    check_source,
    engine_dtype,
    fill_from,
    held_here,
    place_buffers,
    set_data,
)
from ds_trainer.engine.loading.weight_source import attached_weights
from ds_trainer.engine.tensor.repairs import present_if_empty
from ds_trainer.engine.tensor.slices import is_sliced
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@contextmanager
def weights_in_place(model: nn.Module, groups: ParallelGroups, mpu: Any) -> Iterator[None]:
    """While an engine is made over ``model``, its weights go where the engine keeps them, one parameter at a time.

    At ZeRO-3 every parameter becomes a shard before the next one is touched. At lower stages a parameter on meta is
    made on the device; of every gradient group the first rank asks for the elements, and DeepSpeed broadcasts them.

    Raises:
        ConfigError: nothing says what a parameter or buffer on meta holds.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    check_source(model, attached_weights(model))
    original = DeepSpeedEngine._configure_distributed_model

    def configure(engine: Any, module: nn.Module) -> None:
        _place(engine, module, groups, mpu)
        original(engine, module)

    DeepSpeedEngine._configure_distributed_model = configure
    try:
        yield
    finally:
        DeepSpeedEngine._configure_distributed_model = original


def _place(engine: DeepSpeedEngine, model: nn.Module, groups: ParallelGroups, mpu: Any) -> None:
    source = attached_weights(model)
    dtype, _ = engine._mixed_precision_dtypes()
    if _has_distributed_experts(model):
        return  # DeepSpeed shards them over groups that it makes later
    _keep_buffers(engine, model, dtype)
    if engine.zero_optimization_partition_weights():
        place_buffers(model, source, engine.device)
        Sharder(engine, groups, mpu, dtype).shard(model, source)
        return
    materialize(model, engine.device, dtype, groups)
    _begin_states(engine.client_optimizer)
    _release_wholes(model, engine.device, dtype)


def materialize(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None, groups: ParallelGroups | None = None
) -> None:
    """Make the parameters and buffers of ``model`` that are on meta on ``device``; nothing to do without any.

    Args:
        model: may be cut by tensor parallelism; only slices are asked for.
        device: where they are made.
        dtype: of the parameters; None: each keeps its own.
        groups: the first rank of each gradient group reads, and somebody broadcasts; None: every rank reads.

    Raises:
        ConfigError: nothing says what they hold.
    """
    import torch.distributed as dist

    source = attached_weights(model)
    check_source(model, source)
    reads = groups is None or dist.get_rank(groups.gradient) == 0
    tp_rank = 0 if groups is None else groups.place.tp
    with torch.no_grad():
        for name, parameter in list(model.named_parameters()):
            if hasattr(parameter, "ds_id"):
                if not present_if_empty(parameter):
                    parameter.all_gather()  # type: ignore[attr-defined]
                unshard(parameter, parameter.data.to(device, copy=True))
            elif parameter.is_meta:
                place = held_here(name, parameter, tp_rank)
                made = torch.empty(place.slice_shape, dtype=engine_dtype(parameter, dtype), device=device)
                if reads and source is not None:
                    fill_from(source, name, [place], made.view(-1))
                set_data(parameter, made)
    if source is not None:
        place_buffers(model, source, device)


def _begin_states(optimizer: Any) -> None:
    """States that an optimizer made when it was built over parameters on meta; of torch's, Adagrad does."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = optimizer.state.get(parameter, {})
            if not any(isinstance(state, torch.Tensor) and state.is_meta for state in states.values()):
                continue
            if not isinstance(optimizer, torch.optim.Adagrad):
                raise ConfigError(
                    f"{type(optimizer).__name__} makes its states when it is built, and the model was on the meta "
                    "device then. Hand the model in with its weights, or train with zero_stage=3."
                )
            states["sum"] = torch.full_like(parameter, group["initial_accumulator_value"])


def _release_wholes(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Slices that were cut on the host, on the device in memory of their own, so that whole tensors are let go."""
    with torch.no_grad():
        for parameter in model.parameters():
            if is_sliced(parameter) and parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.to(engine_dtype(parameter, dtype)).to(device, copy=True).contiguous()


def _keep_buffers(engine: DeepSpeedEngine, model: nn.Module, dtype: torch.dtype | None) -> None:
    """Buffers that the model wants in float32 become so before they get their numbers."""
    from deepspeed.runtime.keep_in_fp32 import keep_buffers_in_fp32, keep_in_fp32_pattern

    pattern = keep_in_fp32_pattern(model, engine._config.keep_in_fp32_modules, dtype)
    if pattern is not None:
        keep_buffers_in_fp32(model, pattern)


def _has_distributed_experts(model: nn.Module) -> bool:
    experts = [p for p in model.parameters() if getattr(p, "ds_zero_placement_family", "") == "autoep_expert"]
    if any(parameter.is_meta for parameter in experts):
        raise ConfigError("expert_parallel needs a model with its weights, and this one is on the meta device.")
    return bool(experts)

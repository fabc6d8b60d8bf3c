"""Loads the weights of a model onto the device after DeepSpeed has partitioned it and before DeepSpeed moves it.

DeepSpeed 0.19.8 creates an engine in this order (``runtime/engine.py``): it partitions tensor-parallel layers; casts
the module, moves it to the device and broadcasts it (``_configure_distributed_model``); builds the optimizer; and
shards with ZeRO. This module acts before the second of these steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.engine.expert_parallel import has_trained_experts, weight_group
from ds_trainer.engine.loading.parameter_data import (
    check_source,
    engine_dtype,
    fill_slices,
    load_buffers,
    local_slice,
    set_data,
)
from ds_trainer.engine.loading.weight_source import attached_weight_source
from ds_trainer.engine.tensor_parallel.repairs import materialize_if_empty
from ds_trainer.engine.tensor_parallel.slices import is_sliced
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@contextmanager
def loading_weights(model: nn.Module, groups: ParallelGroups, mpu: Any) -> Iterator[None]:
    """Loads the weights of ``model`` to their final location while an engine is created, one parameter at a time.

    At ZeRO-3 every parameter becomes a shard before the next one is loaded. At lower stages a parameter on meta is
    allocated on the device; the first rank of every seq_data_parallel group reads the elements, and DeepSpeed
    broadcasts them.

    Raises:
        ConfigError: a parameter or buffer on meta has no weight source.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    check_source(model, attached_weight_source(model))
    original = DeepSpeedEngine._configure_distributed_model

    def configure(engine: Any, module: nn.Module) -> None:
        _place(engine, module, groups, mpu)
        # At stage 3 the marks of the parameters are enough, and DeepSpeed would ask for layers of its own.
        engine.has_moe_layers = engine.zero_optimization_stage() < 3 and has_trained_experts(module)
        original(engine, module)

    DeepSpeedEngine._configure_distributed_model = configure
    try:
        yield
    finally:
        DeepSpeedEngine._configure_distributed_model = original


def _place(engine: DeepSpeedEngine, model: nn.Module, groups: ParallelGroups, mpu: Any) -> None:
    source = attached_weight_source(model)
    dtype, _ = engine._mixed_precision_dtypes()
    # Convert the buffers that the model keeps in float32 before they are loaded.
    from deepspeed.runtime.keep_in_fp32 import keep_buffers_in_fp32, keep_in_fp32_pattern

    pattern = keep_in_fp32_pattern(model, engine._config.keep_in_fp32_modules, dtype)
    if pattern is not None:
        keep_buffers_in_fp32(model, pattern)
    if engine.zero_optimization_partition_weights():
        load_buffers(model, source, engine.device)
        from ds_trainer.engine.loading.parameter_sharding import ParameterSharder

        ParameterSharder(engine, groups, mpu, dtype).shard(model, source)
        return
    materialize(model, engine.device, dtype, groups)
    _allocate_optimizer_states(engine.client_optimizer)
    # Copy slices of host tensors to their own memory on the device, so that the full tensors are freed.
    with torch.no_grad():
        for parameter in model.parameters():
            if is_sliced(parameter) and parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.to(engine_dtype(parameter, dtype)).to(engine.device, copy=True).contiguous()


def materialize(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None, groups: ParallelGroups | None = None
) -> None:
    """Allocate and load the parameters and buffers of ``model`` that are on meta.

    Args:
        model: the model; if tensor parallelism partitions it, only slices are read.
        device: the target device.
        dtype: dtype of the parameters; None: each keeps its own.
        groups: the first rank of each seq_data_parallel group reads, and the caller broadcasts; None: every rank
            reads.

    Raises:
        ConfigError: a tensor on meta has no weight source.
    """
    import torch.distributed as dist

    from ds_trainer.engine.loading.parameter_sharding import unshard

    source = attached_weight_source(model)
    check_source(model, source)
    tp_rank = 0 if groups is None else groups.coordinates.tp
    with torch.no_grad():
        for name, parameter in list(model.named_parameters()):
            if hasattr(parameter, "ds_id"):
                if not materialize_if_empty(parameter):
                    parameter.all_gather()  # type: ignore[attr-defined]
                unshard(parameter, parameter.data.to(device, copy=True))
            elif parameter.is_meta:
                shard_slice = local_slice(name, parameter, tp_rank)
                made = torch.empty(shard_slice.slice_shape, dtype=engine_dtype(parameter, dtype), device=device)
                reads = groups is None or dist.get_rank(weight_group(parameter, groups)) == 0
                if reads and source is not None:
                    fill_slices(source, name, [shard_slice], made.view(-1))
                set_data(parameter, made)
    if source is not None:
        load_buffers(model, source, device)


def _allocate_optimizer_states(optimizer: Any) -> None:
    """Allocate states that an optimizer created for parameters on meta; of torch's optimizers, Adagrad does."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = optimizer.state.get(parameter, {})
            if not any(isinstance(state, torch.Tensor) and state.is_meta for state in states.values()):
                continue
            if not isinstance(optimizer, torch.optim.Adagrad):
                raise ConfigError(
                    f"{type(optimizer).__name__} creates its states in its constructor, when the model was still on "
                    "the meta device. Pass a model that has its weights, or set zero_stage=3."
                )
            states["sum"] = torch.full_like(parameter, group["initial_accumulator_value"])

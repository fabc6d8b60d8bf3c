"""Loads the weights of a model onto the device after DeepSpeed has partitioned it and before DeepSpeed moves it.

DeepSpeed 0.19.8 creates an engine in this order (``runtime/engine.py``): it partitions tensor-parallel layers; casts
the module, moves it to the device and broadcasts it (``_configure_distributed_model``); builds the optimizer; and
shards with ZeRO. This module acts before the second of these steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from ds_trainer.engine.loading.weight_source import WeightSource, attached_weight_source
from ds_trainer.engine.scalar_parameters import ScalarsAsBytes
from ds_trainer.engine.tensor_parallel.repairs import materialize_if_empty
from ds_trainer.engine.tensor_parallel.slices import is_sliced
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.shard_slices import ShardSlice
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


# ZeRO-3: shards a model one parameter at a time, so that no device ever holds more than one full parameter.
#
# DeepSpeed 0.19.8 (``runtime/engine.py``, ``_configure_distributed_model``) moves the whole module to the device and
# shards it when the optimizer is created, unless its parameters are already sharded. Here they are sharded before, by
# DeepSpeed's own ``deepspeed.zero.Init`` with the settings that DeepSpeed would choose.


class ParameterSharder:
    """Shards parameters over the seq_data_parallel group, one at a time. Collective over that group.

    Args:
        engine: provides the settings: dtypes, parameter offload, secondary partition (hpZ), quantization.
        groups: the process groups and this rank's coordinates.
        mpu: the model parallel unit that DeepSpeed gets.
        dtype: dtype of the weights in this engine; None: each keeps its own.
    """

    def __init__(self, engine: DeepSpeedEngine, groups: ParallelGroups, mpu: Any, dtype: torch.dtype | None) -> None:
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups as deepspeed_groups

        offload = engine.zero_offload_param()
        offloaded = offload is not None and offload.device != "none"
        # With an empty module, zero.Init only applies its global changes (memory-efficient linear layers).
        self._init: Any = Init(
            module=nn.Module(),
            data_parallel_group=groups.seq_data_parallel,
            remote_device=offload.device if offloaded else None,
            pin_memory=offload.pin_memory if offloaded else False,
            config_dict_or_path=engine.config,
            mpu=mpu,
            zero_param_parallel_group=deepspeed_groups._get_zero_param_intra_parallel_group(),
            zero_quantized_weights=engine.zero_quantized_weights(),
            zero_quantized_nontrainable_weights=engine.zero_quantized_nontrainable_weights(),
        )
        self._groups, self._dtype, self._device = groups, dtype, engine.device
        self._remote = str(getattr(self._init.remote_device, "type", self._init.remote_device))

    def shard(self, model: nn.Module, source: WeightSource | None) -> None:
        """Shard all parameters of ``model``; those on meta get their elements from ``source``."""
        self._whole = self._buffer_for(model)
        for name, parameter in list(model.named_parameters()):
            with torch.no_grad(), ScalarsAsBytes():
                if hasattr(parameter, "ds_id"):
                    if not self._matches(parameter):
                        self._reshard(parameter)
                elif parameter.is_meta:
                    assert source is not None  # checked before any parameter changed
                    self._shard_from(source, name, parameter)
                else:
                    self._shard_whole(parameter)
        del self._whole

    def _buffer_for(self, model: nn.Module) -> torch.Tensor:
        """Returns a device buffer for the largest parameter, reused for all of them.

        Separate allocations between shards that stay allocated would fragment the memory.
        """
        sizes = [
            parameter.numel() * engine_dtype(parameter, self._dtype).itemsize
            for parameter in model.parameters()
            if not hasattr(parameter, "ds_id")
        ]
        return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._device)

    def _buffer_view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._whole[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def _shard_whole(self, parameter: Any) -> None:
        """Shard a parameter that has elements; those of the first rank apply, as when DeepSpeed broadcasts a model.

        The other ranks never read their elements, so memory-mapped weights cost them nothing.
        """
        import torch.distributed as dist

        whole, dtype = parameter.data, engine_dtype(parameter, self._dtype)
        in_place = whole.dtype == dtype and whole.device == self._device and whole.is_contiguous()
        reads = dist.get_rank(weight_group(parameter, self._groups)) == 0
        if not (reads and in_place):
            parameter.data = self._buffer_view(whole.shape, dtype)
        if reads and not in_place:
            parameter.data.copy_(whole)  # cast on the source device, the host
        del whole
        self._init._zero_init_param(parameter)

    def _shard_from(self, source: WeightSource, name: str, parameter: Any) -> None:
        """Shard a parameter on meta: each rank reads only its own elements, without communication."""
        local, dtype = local_slice(name, parameter, self._groups.coordinates.tp), engine_dtype(parameter, self._dtype)
        set_data(parameter, self._buffer_view(local.slice_shape, dtype))
        self._init._convert_to_deepspeed_param(parameter)
        fill_slices(source, name, self._local_runs(parameter, local), parameter.data.view(-1))
        parameter.partition()

    def _local_runs(self, parameter: Any, local: ShardSlice) -> list[ShardSlice]:
        """Returns what this rank holds of a parameter: its partition, and with hpZ also its secondary partition."""
        aligned = parameter.aligned_size()

        def run(rank: int, ranks: int) -> ShardSlice:
            size = aligned // ranks
            return local.run(min(rank * size, len(local)), min((rank + 1) * size, len(local)))

        own = run(parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size)
        if self._init.zero_param_process_group is None:
            return [own]
        secondary = run(self._init.rank_in_group, self._init.num_ranks_in_param_group)
        return [secondary] if secondary.start <= own.start and own.stop <= secondary.stop else [own, secondary]

    def _matches(self, parameter: Any) -> bool:
        """Whether an already sharded parameter matches this engine: group, dtype, device, hpZ."""
        group = weight_group(parameter, self._groups)
        if parameter.ds_process_group is not group and _ranks(parameter.ds_process_group) != _ranks(group):
            return False
        if engine_dtype(parameter, self._dtype) != parameter.dtype:
            return False
        if (parameter.ds_zero_param_process_group is None) != (self._init.zero_param_process_group is None):
            return False
        if parameter.ds_secondary_tensor_group_size != self._init.num_ranks_in_param_group:
            return False
        shard = parameter.ds_tensor
        location = str(getattr(shard.final_location, "value", shard.final_location) or shard.device.type)
        return bool(parameter.ds_persist) or location == self._remote or (self._remote == "nvme" and location == "cpu")

    def _reshard(self, parameter: Any) -> None:
        """Gather a parameter that is sharded differently and shard it again. Collective over its shard group."""
        if not materialize_if_empty(parameter):
            parameter.all_gather()
        unshard(parameter, parameter.data.to(engine_dtype(parameter, self._dtype), copy=True))
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()


# Methods that zero.Init adds to a parameter (0.19.8: _convert_to_deepspeed_param).
_ZERO_INIT_METHODS = (
    "all_gather",
    "all_gather_coalesced",
    "partition",
    "reduce_gradients_at_owner",
    "partition_gradients",
    "aligned_size",
    "padding_size",
    "partition_numel",
    "item",
    "convert_to_zero_parameters",
    "is_external_param",
    "nvme_swapper",
)
_ZERO_INIT_STATE = (
    "ds_param_type",
    "ds_status",
    "ds_shape",
    "ds_numel",
    "ds_numel_aligned",
    "ds_tensor",
    "ds_secondary_tensor",
    "ds_active_sub_modules",
    "ds_persist",
    "ds_process_group",
    "ds_enable_sanity_checks",
    "ds_zero_param_process_group",
    "ds_zero_partition_process_group",
    "ds_zero_partition_rank",
    "ds_zero_partition_world_size",
    "ds_secondary_tensor_group_size",
    "ds_secondary_tensor_num_of_groups",
    "ds_id",
    "ds_summary",
)


def unshard(parameter: Any, whole: torch.Tensor) -> None:
    """Convert a parameter that ZeRO-3 shards to a plain one with the elements of ``whole``."""
    for name in (*_ZERO_INIT_METHODS, *_ZERO_INIT_STATE):
        parameter.__dict__.pop(name, None)
    parameter.data = whole


def _ranks(group: Any) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(group)

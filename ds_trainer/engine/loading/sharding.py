"""ZeRO-3: a model becomes shards one parameter at a time, so that no device ever holds more than one whole parameter.

DeepSpeed 0.19.8 (``runtime/engine.py``, ``_configure_distributed_model``) moves the whole module to the device, and
shards it when the optimizer is made, unless its parameters are shards already. Here they are made so before. What
makes a shard is DeepSpeed's own ``deepspeed.zero.Init``, with the settings that it would choose for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.engine.loading.tensors import engine_dtype, fill_from, held_here, set_data
from ds_trainer.engine.loading.weight_source import WeightSource
from ds_trainer.engine.scalars import ScalarsAsBytes
from ds_trainer.engine.tensor.repairs import present_if_empty
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.places import Place

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Sharder:
    """Turns parameters into shards over the gradient group, one at a time. Collective over that group.

    Args:
        engine: whose settings decide: types, offload of parameters, second partition (hpZ), quantization.
        groups: where every rank stands.
        mpu: what DeepSpeed is told of it.
        dtype: of the weights in this engine; None: each keeps its own.
    """

    def __init__(self, engine: DeepSpeedEngine, groups: ParallelGroups, mpu: Any, dtype: torch.dtype | None) -> None:
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups as deepspeed_groups

        offload = engine.zero_offload_param()
        offloaded = offload is not None and offload.device != "none"
        # An empty module: what zero.Init does to modules (memory-efficient linear layers) is done, and nothing more.
        self._init: Any = Init(
            module=nn.Module(),
            data_parallel_group=groups.gradient,
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
        """Make all parameters of ``model`` shards; those on meta get their elements from ``source``."""
        self._whole = self._buffer_for(model)
        for name, parameter in list(model.named_parameters()):
            with torch.no_grad(), ScalarsAsBytes():
                if hasattr(parameter, "ds_id"):
                    if not self._fits(parameter):
                        self._shard_anew(parameter)
                elif parameter.is_meta:
                    assert source is not None  # checked before anything was changed
                    self._shard_from(source, name, parameter)
                else:
                    self._shard_whole(parameter)
        del self._whole

    def _buffer_for(self, model: nn.Module) -> torch.Tensor:
        """Bytes on the device for the largest parameter.

        In one buffer for all of them one after the other; allocated one by one, between shards that stay, they would
        leave holes that no later one fits into.
        """
        sizes = [
            parameter.numel() * engine_dtype(parameter, self._dtype).itemsize
            for parameter in model.parameters()
            if not hasattr(parameter, "ds_id")
        ]
        return torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self._device)

    def _room_for(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._whole[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def _shard_whole(self, parameter: Any) -> None:
        """Of a parameter with elements: those of the first rank count, as where DeepSpeed broadcasts a model.

        The others never read theirs, so that memory-mapped weights cost them nothing.
        """
        import torch.distributed as dist

        whole, dtype = parameter.data, engine_dtype(parameter, self._dtype)
        there = whole.dtype == dtype and whole.device == self._device and whole.is_contiguous()
        reads = dist.get_rank(self._groups.gradient) == 0
        if not (reads and there):
            parameter.data = self._room_for(whole.shape, dtype)
        if reads and not there:
            parameter.data.copy_(whole)  # cast where it comes from: on the host
        del whole
        self._init._zero_init_param(parameter)

    def _shard_from(self, source: WeightSource, name: str, parameter: Any) -> None:
        """Of a parameter on meta: this rank's elements alone are asked for, and no rank sends any."""
        held, dtype = held_here(name, parameter, self._groups.place.tp), engine_dtype(parameter, self._dtype)
        set_data(parameter, self._room_for(held.slice_shape, dtype))
        self._init._convert_to_deepspeed_param(parameter)
        fill_from(source, name, self._own_runs(parameter, held), parameter.data.view(-1))
        parameter.partition()

    def _own_runs(self, parameter: Any, held: Place) -> list[Place]:
        """What this rank keeps of a parameter: its partition, and with hpZ its second partition too."""
        aligned = parameter.aligned_size()

        def run(rank: int, ranks: int) -> Place:
            size = aligned // ranks
            return held.run(min(rank * size, len(held)), min((rank + 1) * size, len(held)))

        own = run(parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size)
        if self._init.zero_param_process_group is None:
            return [own]
        second = run(self._init.rank_in_group, self._init.num_ranks_in_param_group)
        return [second] if second.start <= own.start and own.stop <= second.stop else [own, second]

    def _fits(self, parameter: Any) -> bool:
        """Whether a parameter that is sharded already is so as this engine shards: group, type, place, hpZ."""
        group = self._groups.gradient
        if parameter.ds_process_group is not group and _ranks(parameter.ds_process_group) != _ranks(group):
            return False
        if engine_dtype(parameter, self._dtype) != parameter.dtype:
            return False
        if (parameter.ds_zero_param_process_group is None) != (self._init.zero_param_process_group is None):
            return False
        if parameter.ds_secondary_tensor_group_size != self._init.num_ranks_in_param_group:
            return False
        shard = parameter.ds_tensor
        kept = str(getattr(shard.final_location, "value", shard.final_location) or shard.device.type)
        return bool(parameter.ds_persist) or kept == self._remote or (self._remote == "nvme" and kept == "cpu")

    def _shard_anew(self, parameter: Any) -> None:
        """Gather a parameter that is sharded in another way, and shard it. Collective over the ranks that share it."""
        if not present_if_empty(parameter):
            parameter.all_gather()
        unshard(parameter, parameter.data.to(engine_dtype(parameter, self._dtype), copy=True))
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()


# What zero.Init puts on a parameter beside attributes that begin with ds_ (0.19.8: _convert_to_deepspeed_param).
_OF_ZERO_INIT = (
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
_STATE_OF_ZERO_INIT = (
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
    """Make a parameter that ZeRO-3 shards a plain one again, with the elements of ``whole``."""
    for name in (*_OF_ZERO_INIT, *_STATE_OF_ZERO_INIT):
        parameter.__dict__.pop(name, None)
    parameter.data = whole


def _ranks(group: Any) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(group)

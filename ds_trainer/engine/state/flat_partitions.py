"""``FlatPartition``: a tensor that an optimizer steps, and the parameter fragments in it.

DeepSpeed does not step the model's tensors but flattened 32-bit copies, of which a rank has only its partition. Each of
its five optimizer wrappers has a different layout; this module describes all of them as :class:`FlatPartition`. Source:
DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``,
``runtime/fp16/{fused,unfused}_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ds_trainer.engine.expert_parallel import expert_slice
from ds_trainer.engine.tensor_parallel.slices import is_sliced, tensor_parallel_slice
from ds_trainer.parallel.shard_slices import ShardSlice

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class ParameterFragment(NamedTuple):
    """A fragment of a parameter: elements ``[offset, offset + len(slice))`` of the flattened partition."""

    name: str
    parameter: torch.Tensor
    slice: ShardSlice
    offset: int


@dataclass(eq=False)
class History:
    """Fragments of a partition that were used in the same steps share one.

    Attributes:
        scalars: their optimizer states that are one number, such as the step counter.
        began: whether a step used them; otherwise the optimizer has no states of them.
    """

    scalars: dict[str, Any]
    began: bool


def _resident(changing: bool) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class FlatPartition:
    """One tensor that the optimizer steps: the master weights of some parameters, or of this rank's fragments of them.

    Attributes:
        tensor: the master weights; may be empty outside of :attr:`present`.
        numel: number of elements of the tensor while it is in memory.
        fragments: the parameter fragments in it; elements between and after them are padding.
        optimizer: the optimizer whose ``state[tensor]`` holds its states.
        group: its parameter group in ``optimizer``; ZeRO-3 lists the tensor there only while stepping it.
        replicated: all data-parallel ranks hold the same values.
        present: ``present(changing)`` is a context in which the tensor and its states are in memory; with ``changing``,
            modifications are kept.
    """

    tensor: torch.Tensor
    numel: int
    fragments: list[ParameterFragment]
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    replicated: bool
    present: Callable[[bool], AbstractContextManager[None]] = field(default=_resident)

    @property
    def states(self) -> dict[str, Any]:
        """The optimizer's states of this tensor; empty before the first step."""
        return self.optimizer.state[self.tensor]

    @property
    def histories(self) -> list[History] | None:
        """The history of each fragment; None if all were used in the same steps."""
        return getattr(self.tensor, "ds_trainer_histories", None)

    @histories.setter
    def histories(self, histories: list[History] | None) -> None:
        self.tensor.ds_trainer_histories = histories  # type: ignore[attr-defined]


class UnknownState(ValueError):
    """DeepSpeed stores weights or optimizer states in a layout that this module does not support."""


def parameter_slice(parameter: torch.Tensor, tp_rank: int) -> ShardSlice:
    """The slice of a parameter that this tensor-parallel rank holds, before any sharding by ZeRO-3.

    Raises:
        UnknownState: DeepSpeed did not record how it partitioned the parameter.
    """
    if (part := expert_slice(parameter)) is not None:
        return part
    if is_sliced(parameter):
        try:
            return tensor_parallel_slice(parameter, tp_rank)
        except ValueError as error:
            raise UnknownState(str(error)) from error
    return ShardSlice.whole(tuple(getattr(parameter, "ds_shape", parameter.shape)))


def zero_shard_slice(parameter: Any, tp_rank: int) -> ShardSlice:
    """The shard of a ZeRO-3 parameter that this rank holds, without padding."""
    import torch.distributed as dist

    full = parameter_slice(parameter, tp_rank)
    size = parameter.partition_numel()
    first = dist.get_rank(parameter.ds_process_group) * size
    return full.run(min(first, len(full)), min(first + size, len(full)))


def flat_partitions(engine: DeepSpeedEngine, tp_rank: int) -> list[FlatPartition]:
    """The tensors that ``engine``'s optimizer steps, in the optimizer's order.

    Raises:
        UnknownState: this module does not support the optimizer's wrapper, or DeepSpeed did not record how it
            partitioned a parameter.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    names = _Names(engine.module, tp_rank)
    wrapper: Any = engine.optimizer
    if wrapper is engine.basic_optimizer:
        # Stage 0 in float32: the optimizer steps the model's own parameters.
        return [
            FlatPartition(parameter, parameter.numel(), [names.fragment(parameter)], wrapper, group, replicated=True)
            for group in wrapper.param_groups
            for parameter in group["params"]
        ]
    layouts: dict[type, Callable[[Any, _Names], list[FlatPartition]]] = {
        DeepSpeedZeroOptimizer: _zero_1_and_2,
        DeepSpeedZeroOptimizer_Stage3: _zero_3,
        BF16_Optimizer: _bf16,
        FP16_Optimizer: _fused,
        FP16_UnfusedOptimizer: _unfused,
    }
    layout = layouts.get(type(wrapper))  # not isinstance: ZenFlow and SuperOffload subclass these, but differ
    if layout is None:
        raise UnknownState(f"the state layout of DeepSpeed's {type(wrapper).__name__} is not supported")
    return layout(wrapper, names)


class _Names:
    def __init__(self, model: torch.nn.Module, tp_rank: int) -> None:
        self.tp_rank = tp_rank
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def fragment(
        self, parameter: torch.Tensor, shard_slice: ShardSlice | None = None, offset: int = 0
    ) -> ParameterFragment:
        shard_slice = parameter_slice(parameter, self.tp_rank) if shard_slice is None else shard_slice
        return ParameterFragment(self._names[id(parameter)], parameter, shard_slice, offset)


def _unfused(wrapper: Any, names: _Names) -> list[FlatPartition]:
    """Stage 0 in 16 bits: one master for each parameter."""
    optimizer = wrapper.optimizer
    return [
        FlatPartition(master, master.numel(), [names.fragment(parameter)], optimizer, group, replicated=True)
        for group, parameters, masters in zip(
            optimizer.param_groups, wrapper.fp16_groups, wrapper.fp32_groups, strict=True
        )
        for parameter, master in zip(parameters, masters, strict=True)
    ]


def _fused(wrapper: Any, names: _Names) -> list[FlatPartition]:
    """Stage 0 in 16 bits with a fused optimizer: the masters of a group in one tensor."""
    optimizer = wrapper.optimizer
    return [
        FlatPartition(master, master.numel(), list(_consecutive(parameters, names)), optimizer, group, replicated=True)
        for group, parameters, master in zip(
            optimizer.param_groups, wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True
        )
    ]


def _consecutive(parameters: Iterable[torch.Tensor], names: _Names) -> Iterator[ParameterFragment]:
    offset = 0
    for parameter in parameters:
        yield names.fragment(parameter, offset=offset)
        offset += parameter.numel()


def _zero_1_and_2(wrapper: Any, names: _Names) -> list[FlatPartition]:
    """Stages 1 and 2: this rank's partition of each flattened group.

    Does not use ``_hp_mapping``: with ``round_robin_gradients`` DeepSpeed 0.19.8 flattens parameters in a different
    order than the mapping assumes.
    """
    import torch.distributed as dist

    partitions, optimizer = [], wrapper.optimizer
    for index, master in enumerate(wrapper.single_partition_of_fp32_groups):
        first = dist.get_rank(wrapper.real_dp_process_group[index]) * master.numel()
        last, fragments = first + master.numel(), []
        parameters, offsets = wrapper.round_robin_bit16_groups[index], wrapper.round_robin_bit16_offsets[index]
        for parameter, offset in zip(parameters, offsets, strict=True):
            begin, end = max(first, offset), min(last, offset + parameter.numel())
            if begin < end:
                held = parameter_slice(parameter, names.tp_rank).run(begin - offset, end - offset)
                fragments.append(names.fragment(parameter, held, begin - first))
        group = optimizer.param_groups[index]
        partitions.append(FlatPartition(master, master.numel(), fragments, optimizer, group, replicated=False))
    return partitions


def _bf16(wrapper: Any, names: _Names) -> list[FlatPartition]:
    """Stage 1 in bf16 with gradients accumulated in float32."""
    partitions, optimizer = [], wrapper.optimizer
    for group, parameters, master in zip(
        optimizer.param_groups, wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, strict=True
    ):
        fragments = []
        for parameter in parameters:
            if parameter._hp_mapping is None:
                continue  # held by another rank
            address, source = parameter._hp_mapping.hp_fragment_address, parameter._hp_mapping.lp_fragment_address
            held = parameter_slice(parameter, names.tp_rank).run(source.start, source.start + source.numel)
            fragments.append(names.fragment(parameter, held, address.start))
        partitions.append(FlatPartition(master, master.numel(), fragments, optimizer, group, replicated=False))
    return partitions


def _zero_3(wrapper: Any, names: _Names) -> list[FlatPartition]:
    """Stage 3: for each sub-group, this rank's shards of its parameters."""
    partitions = []
    for index, (parameters, master) in enumerate(
        zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)
    ):
        fragments, offset = [], 0
        for parameter in parameters:
            fragments.append(names.fragment(parameter, zero_shard_slice(parameter, names.tp_rank), offset))
            offset += parameter.partition_numel()
        optimizer = wrapper.optimizer
        devices = getattr(wrapper, "subgroup_to_device", None) or {}
        if devices.get(index, "cpu") != "cpu":  # Twin-Flow: some sub-groups are stepped on the device
            optimizer = getattr(wrapper, "backup_optimizer", optimizer)
        group = optimizer.param_groups[wrapper.sub_group_to_group_id[index]]
        present = sub_group(wrapper, index)
        partitions.append(FlatPartition(master, offset, fragments, optimizer, group, replicated=False, present=present))
    return partitions


def sub_group(wrapper: Any, index: int) -> Callable[[bool], AbstractContextManager[None]]:
    """:attr:`FlatPartition.present` of a sub-group of ZeRO-3."""

    @contextmanager
    def present(changing: bool) -> Iterator[None]:
        swapped = wrapper._swappable_optimizer_subgroup(index)
        if swapped:
            wrapper._optimizer_states_and_gradient_swap_in(index)
        try:
            yield
            if changing:
                wrapper._reassign_or_swap_out_partitioned_parameters(index)
        finally:
            if swapped and changing:
                wrapper._optimizer_states_and_gradient_swap_out(index)
            elif swapped:
                wrapper._release_swap_buffers(index)

    return present


def refresh_weights(engine: DeepSpeedEngine) -> None:
    """Updates the model's weights from changed master weights. Collective under ZeRO."""
    wrapper: Any = engine.optimizer
    if hasattr(wrapper, "update_lp_params"):  # stages 1 and 2, bf16
        wrapper.update_lp_params()
    elif hasattr(wrapper, "fp32_groups_flat"):
        with torch.no_grad():
            for parameters, master in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
                values = master.split([parameter.numel() for parameter in parameters])
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value.view_as(parameter))
    elif hasattr(wrapper, "fp32_groups"):
        with torch.no_grad():
            for parameters, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)

"""The tensors that an optimizer steps, and which parameters they hold.

DeepSpeed steps other tensors than the model's: copies in 32 bits, flattened, and only this rank's share of them. Each
of its five optimizer wrappers lays them out in its own way; here they all become :class:`Unit`. Read from DeepSpeed
0.19.8: ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``,
``runtime/fp16/{fused,unfused}_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ds_trainer.engine.tensor.slices import is_sliced, slice_place
from ds_trainer.parallel.places import Place

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Member(NamedTuple):
    """A part of a parameter inside a unit: elements ``[offset, offset + len(place))`` of the flattened unit."""

    name: str
    parameter: torch.Tensor
    place: Place
    offset: int


def _stays(changing: bool) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class Unit:
    """One tensor that the optimizer steps: the master weights of some parameters, or of a rank's share of them.

    Attributes:
        tensor: the master weights; may be empty while :attr:`present` is not entered.
        numel: elements of the tensor when it is there.
        members: what it holds; elements between and after them are padding.
        optimizer: whose ``state[tensor]`` belongs to it.
        group: its parameter group in ``optimizer``; ZeRO-3 lists the tensor there only while it is stepped.
        replicated: all data-parallel ranks hold the same.
        present: ``present(changing)`` is a context in which tensor and states are in memory; with ``changing`` what was
            written to them is kept.
    """

    tensor: torch.Tensor
    numel: int
    members: list[Member]
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    replicated: bool
    present: Callable[[bool], AbstractContextManager[None]] = field(default=_stays)

    @property
    def states(self) -> dict[str, Any]:
        """The optimizer's state of this tensor; empty before the first step."""
        return self.optimizer.state[self.tensor]


class UnknownState(ValueError):
    """DeepSpeed keeps weights or optimizer states in a way that is not known here."""


def place_of(parameter: torch.Tensor, tp_rank: int) -> Place:
    """All that this tensor-parallel rank holds of a parameter, whether or not ZeRO-3 shards it.

    Raises:
        UnknownState: DeepSpeed does not say how it cut the parameter.
    """
    if is_sliced(parameter):
        try:
            return slice_place(parameter, tp_rank)
        except ValueError as error:
            raise UnknownState(str(error)) from error
    return Place.whole(tuple(getattr(parameter, "ds_shape", parameter.shape)))


def shard_place(parameter: Any, tp_rank: int) -> Place:
    """What this rank holds of a parameter that ZeRO-3 shards, without padding."""
    import torch.distributed as dist

    whole = place_of(parameter, tp_rank)
    size = parameter.partition_numel()
    first = dist.get_rank(parameter.ds_process_group) * size
    return whole.run(min(first, len(whole)), min(first + size, len(whole)))


def units_of(engine: DeepSpeedEngine, tp_rank: int) -> list[Unit]:
    """Everything that ``engine``'s optimizer steps, in its order.

    Raises:
        UnknownState: the optimizer is none of the wrappers that this module knows, or DeepSpeed does not say how it
            cut a parameter.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    names = _Names(engine.module, tp_rank)
    wrapper: Any = engine.optimizer
    if wrapper is engine.basic_optimizer:
        return _plain(wrapper, names)
    layouts: dict[type, Callable[[Any, _Names], list[Unit]]] = {
        DeepSpeedZeroOptimizer: _zero_1_and_2,
        DeepSpeedZeroOptimizer_Stage3: _zero_3,
        BF16_Optimizer: _bf16,
        FP16_Optimizer: _fused,
        FP16_UnfusedOptimizer: _unfused,
    }
    layout = layouts.get(type(wrapper))  # not isinstance: ZenFlow and SuperOffload derive from these, and differ
    if layout is None:
        raise UnknownState(f"the state of DeepSpeed's {type(wrapper).__name__} is not known")
    return layout(wrapper, names)


class _Names:
    def __init__(self, model: torch.nn.Module, tp_rank: int) -> None:
        self.tp_rank = tp_rank
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def member(self, parameter: torch.Tensor, place: Place | None = None, offset: int = 0) -> Member:
        place = place_of(parameter, self.tp_rank) if place is None else place
        return Member(self._names[id(parameter)], parameter, place, offset)


def _plain(optimizer: torch.optim.Optimizer, names: _Names) -> list[Unit]:
    """Stage 0 in float32: the optimizer steps the model's own parameters."""
    return [
        Unit(parameter, parameter.numel(), [names.member(parameter)], optimizer, group, replicated=True)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _unfused(wrapper: Any, names: _Names) -> list[Unit]:
    """Stage 0 in 16 bits: one master for each parameter."""
    optimizer = wrapper.optimizer
    return [
        Unit(master, master.numel(), [names.member(parameter)], optimizer, group, replicated=True)
        for group, parameters, masters in zip(
            optimizer.param_groups, wrapper.fp16_groups, wrapper.fp32_groups, strict=True
        )
        for parameter, master in zip(parameters, masters, strict=True)
    ]


def _fused(wrapper: Any, names: _Names) -> list[Unit]:
    """Stage 0 in 16 bits with a fused optimizer: the masters of a group in one tensor."""
    optimizer = wrapper.optimizer
    return [
        Unit(master, master.numel(), list(_one_after_another(parameters, names)), optimizer, group, replicated=True)
        for group, parameters, master in zip(
            optimizer.param_groups, wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True
        )
    ]


def _one_after_another(parameters: Iterable[torch.Tensor], names: _Names) -> Iterator[Member]:
    offset = 0
    for parameter in parameters:
        yield names.member(parameter, offset=offset)
        offset += parameter.numel()


def _zero_1_and_2(wrapper: Any, names: _Names) -> list[Unit]:
    """Stages 1 and 2: this rank's part of the flattened group.

    Not by ``_hp_mapping``: with ``round_robin_gradients`` DeepSpeed 0.19.8 flattens parameters in another order than it
    counts there.
    """
    import torch.distributed as dist

    units, optimizer = [], wrapper.optimizer
    for index, master in enumerate(wrapper.single_partition_of_fp32_groups):
        first = dist.get_rank(wrapper.real_dp_process_group[index]) * master.numel()
        last, members = first + master.numel(), []
        parameters, offsets = wrapper.round_robin_bit16_groups[index], wrapper.round_robin_bit16_offsets[index]
        for parameter, offset in zip(parameters, offsets, strict=True):
            begin, end = max(first, offset), min(last, offset + parameter.numel())
            if begin < end:
                place = place_of(parameter, names.tp_rank).run(begin - offset, end - offset)
                members.append(names.member(parameter, place, begin - first))
        group = optimizer.param_groups[index]
        units.append(Unit(master, master.numel(), members, optimizer, group, replicated=False))
    return units


def _bf16(wrapper: Any, names: _Names) -> list[Unit]:
    """Stage 1 in bf16 with gradients accumulated in float32."""
    units, optimizer = [], wrapper.optimizer
    for group, parameters, master in zip(
        optimizer.param_groups, wrapper.bf16_groups, wrapper.fp32_groups_flat_partition, strict=True
    ):
        members = []
        for parameter in parameters:
            if parameter._hp_mapping is None:
                continue  # another rank's
            address, source = parameter._hp_mapping.hp_fragment_address, parameter._hp_mapping.lp_fragment_address
            place = place_of(parameter, names.tp_rank).run(source.start, source.start + source.numel)
            members.append(names.member(parameter, place, address.start))
        units.append(Unit(master, master.numel(), members, optimizer, group, replicated=False))
    return units


def _zero_3(wrapper: Any, names: _Names) -> list[Unit]:
    """Stage 3: for each sub-group this rank's part of each of its parameters."""
    units = []
    for index, (parameters, master) in enumerate(
        zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)
    ):
        members, offset = [], 0
        for parameter in parameters:
            members.append(names.member(parameter, shard_place(parameter, names.tp_rank), offset))
            offset += parameter.partition_numel()
        optimizer = wrapper.optimizer
        devices = getattr(wrapper, "subgroup_to_device", None) or {}
        if devices.get(index, "cpu") != "cpu":  # Twin-Flow: a part of the steps is taken on the device
            optimizer = getattr(wrapper, "backup_optimizer", optimizer)
        group = optimizer.param_groups[wrapper.sub_group_to_group_id[index]]
        present = _sub_group(wrapper, index)
        units.append(Unit(master, offset, members, optimizer, group, replicated=False, present=present))
    return units


def _sub_group(wrapper: Any, index: int) -> Callable[[bool], AbstractContextManager[None]]:
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


def weights_follow(engine: DeepSpeedEngine) -> None:
    """After units were changed: give the model the weights that follow from the masters. Collective under ZeRO."""
    wrapper: Any = engine.optimizer
    if hasattr(wrapper, "update_lp_params"):  # stages 1 and 2, bf16
        wrapper.update_lp_params()
    elif hasattr(wrapper, "fp32_groups_flat"):
        with torch.no_grad():
            for parameters, master in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True):
                pieces = master.split([parameter.numel() for parameter in parameters])
                for parameter, piece in zip(parameters, pieces, strict=True):
                    parameter.copy_(piece.view_as(parameter))
    elif hasattr(wrapper, "fp32_groups"):
        with torch.no_grad():
            for parameters, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)

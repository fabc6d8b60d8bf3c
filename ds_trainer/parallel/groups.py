"""The process groups of a layout, made in one place, and the object that DeepSpeed takes as ``mpu``.

DeepSpeed is told tensor parallelism, and one group of ``dp x cp x sp`` ranks as its data-parallel group: ZeRO shards
over it and gradients are averaged over it. Cutting sequences is ours, so DeepSpeed's own sequence parallelism (whose
gradients come out ``sp`` times too large on ZeRO 0-2) is never switched on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_trainer.parallel.layout import Coordinates, ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.connections import noted_connections

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_made: dict[ParallelLayout, tuple[ProcessGroup, ParallelGroups]] = {}


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """This rank's process group along each axis, and the joined ones.

    Attributes:
        layout: the layout.
        place: this rank's coordinates.
        dp, cp, sp, tp: ranks that differ along one axis only.
        sequence: ``cp x sp`` ranks that share the sequences of a batch, in the order of :meth:`SequencePlan.order`.
        gradient: ``dp x cp x sp`` ranks with the same parameters and other tokens.
        replica: ``cp x sp x tp`` ranks that work on the same samples.
        replica_host: the same ranks, for tensors in host memory (gloo), whatever the backend of the others.
        world_host: all ranks, likewise.
    """

    layout: ParallelLayout
    place: Coordinates
    dp: ProcessGroup
    cp: ProcessGroup
    sp: ProcessGroup
    tp: ProcessGroup
    sequence: ProcessGroup
    gradient: ProcessGroup
    replica: ProcessGroup
    replica_host: ProcessGroup
    world_host: ProcessGroup


_AXES_OF = {
    "dp": ("dp",),
    "cp": ("cp",),
    "sp": ("sp",),
    "tp": ("tp",),
    "sequence": ("cp", "sp"),
    "gradient": ("dp", "cp", "sp"),
    "replica": ("cp", "sp", "tp"),
}


def parallel_groups(layout: ParallelLayout) -> ParallelGroups:
    """The groups of ``layout``, made at the first call. Collective then; needs a process group of its world's size.

    Raises:
        ValueError: the process group has another number of ranks than the layout.
    """
    import torch.distributed as dist

    if distributed.world_size() != layout.world_size:
        raise ValueError(f"the layout is {layout.describe()}, but the process group has {distributed.world_size()}")
    world = dist.group.WORLD
    assert world is not None  # world_size asked it
    made = _made.get(layout)
    if made is not None and made[0] is world:
        return made[1]
    rank = distributed.rank()
    by_ranks: dict[tuple[int, ...], ProcessGroup] = {tuple(range(layout.world_size)): world}
    mine: dict[str, ProcessGroup] = {}
    for name, axes in _AXES_OF.items():
        for ranks in layout.groups(axes):  # every rank takes part in making every group, in the same order
            key = tuple(ranks)
            if key not in by_ranks:
                with noted_connections():
                    by_ranks[key] = dist.new_group(ranks)
            if rank in ranks:
                mine[name] = by_ranks[key]
    mine["replica_host"], mine["world_host"] = mine["replica"], world
    if dist.get_backend() != "gloo":
        with noted_connections():
            mine["world_host"] = dist.new_group(backend="gloo")
    if dist.get_backend() != "gloo" and layout.replica_size > 1:
        for ranks in layout.groups(_AXES_OF["replica"]):
            with noted_connections():
                group = dist.new_group(ranks, backend="gloo")
            if rank in ranks:
                mine["replica_host"] = group
    groups = ParallelGroups(layout, layout.coordinates(rank), **mine)
    _made[layout] = (world, groups)
    distributed.use_host_group(groups.world_host)
    return groups


def forget_groups() -> None:
    """Let go of all groups, after the process group that they belong to."""
    _made.clear()
    distributed.use_host_group(None)


class Mpu:
    """What DeepSpeed asks a *model parallelism unit*: sizes, ranks and groups.

    The data-parallel *size* is that of the batch arithmetic (replicas that see other samples); the data-parallel
    *group* is what DeepSpeed shards and averages over, which with cut sequences has more ranks.

    Source of the names: ``deepspeed.utils.groups`` and Megatron-LM's ``mpu``.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def get_data_parallel_world_size(self) -> int:
        return self._groups.layout.dp

    def get_data_parallel_rank(self) -> int:
        return self._groups.gradient.rank()

    def get_data_parallel_group(self) -> ProcessGroup:
        return self._groups.gradient

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._groups.layout.group_of(distributed.rank(), _AXES_OF["gradient"])

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._groups.layout.gradient_ranks

    def get_sequence_data_parallel_rank(self) -> int:
        return self._groups.gradient.rank()

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        return self._groups.gradient

    def get_model_parallel_world_size(self) -> int:
        return self._groups.layout.tp

    def get_model_parallel_rank(self) -> int:
        return self._groups.place.tp

    def get_model_parallel_group(self) -> ProcessGroup:
        return self._groups.tp

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the first member of the tensor-parallel group."""
        return distributed.rank() - self._groups.place.tp

    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_group = get_model_parallel_group

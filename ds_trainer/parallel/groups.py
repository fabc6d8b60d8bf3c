"""The process groups of a layout, made in one place, and the object that DeepSpeed takes as ``mpu``.

DeepSpeed is told tensor parallelism, and one group of ``dp x cp x sp`` ranks as its data-parallel group: ZeRO shards
over it and gradients are averaged over it. Cutting sequences is ours, so DeepSpeed's own sequence parallelism (whose
gradients come out ``sp`` times too large on ZeRO 0-2) is never switched on.

The number of groups that a rank makes depends on the axes, not on the number of ranks. Where the process group is bound
to a device (NCCL), each axis is one ``split_group``: one ``ncclCommSplit`` that all ranks enter, each with its own
group. Elsewhere (gloo, or NCCL without a device) only the members of a group make it. Axes with the same groups share
them, a group of all ranks is the default one, and all axes of size 1 share one group that talks to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ds_trainer.parallel.layout import AXES, Coordinates, ParallelLayout, Strides, groups_of
from ds_trainer.utils import distributed
from ds_trainer.utils.connections import noted_connections
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.host_votes import reachable_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_made: dict[Strides, ProcessGroup] = {}
_made_for_host: dict[Strides, ProcessGroup | None] = {}
_of_layouts: dict[ParallelLayout, ParallelGroups] = {}
_made_in: ProcessGroup | None = None  # the default group that they belong to


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
        world_host: all ranks, likewise; None where they cannot reach each other over gloo.
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
    world_host: ProcessGroup | None


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
    """The groups of ``layout``; what no layout has asked for yet is made. Collective then.

    Raises:
        ValueError: the process group has another number of ranks than the layout.
        ConfigError: the ranks of a replica cannot reach each other over gloo.
    """
    import torch.distributed as dist

    if distributed.world_size() != layout.world_size:
        raise ValueError(f"the layout is {layout.describe()}, but the process group has {distributed.world_size()}")
    if _made_in is dist.group.WORLD and layout in _of_layouts:
        return _of_layouts[layout]
    mine = {name: group_along(layout.strides(axes)) for name, axes in _AXES_OF.items()}
    mine["replica_host"] = mine["replica"]
    world_host: ProcessGroup | None = dist.group.WORLD
    if dist.get_backend() != "gloo":
        world_host = _host_group(layout.strides(AXES))
        if layout.replica_size > 1:
            replica_host = _host_group(layout.strides(_AXES_OF["replica"]))
            if replica_host is None:
                raise ConfigError(
                    f"Batches are handed from rank to rank in each replica ({layout.describe()}) over gloo, which "
                    "cannot connect the ranks. Set GLOO_SOCKET_IFNAME to the network interface between the machines, "
                    "as for NCCL."
                )
            mine["replica_host"] = replica_host
    place = layout.coordinates(distributed.rank())
    _of_layouts[layout] = ParallelGroups(layout, place, **mine, world_host=world_host)
    distributed.use_host_group(world_host)
    return _of_layouts[layout]


def group_along(strides: Strides) -> ProcessGroup:
    """This rank's group of those that ``strides`` divide the world into, made at the first call. Collective then.

    Args:
        strides: the form of the groups (:meth:`ParallelLayout.strides`).
    """
    world = _world()
    if strides == (((1, world.size()),) if world.size() > 1 else ()):
        return world
    if strides not in _made:
        with noted_connections():
            _made[strides] = _make(world, strides)
    return _made[strides]


def _host_group(strides: Strides) -> ProcessGroup | None:
    """The same for tensors in host memory, beside NCCL; None, on all ranks, where gloo cannot connect them."""
    world = _world()
    if strides not in _made_for_host:
        with noted_connections():
            _made_for_host[strides] = reachable_group(lambda limit: _make(world, strides, "gloo", limit))
    return _made_for_host[strides]


def _world() -> ProcessGroup:
    """The default group. Groups that belong to an earlier one are forgotten."""
    global _made_in
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None  # the caller has a process group
    if _made_in is not world:
        forget_groups()
        _made_in = world
    return world


def _make(
    world: ProcessGroup, strides: Strides, backend: str | None = None, limit: timedelta | None = None
) -> ProcessGroup:
    import torch.distributed as dist

    groups = groups_of(strides, world.size())
    own = next(ranks for ranks in groups if world.rank() in ranks)
    device = world.bound_device_id
    if len(own) == 1:
        # In a group that is bound to a device torch splits the communicator of all ranks at once. Without, a group of
        # one rank has none until somebody uses it, and then makes it alone.
        world.bound_device_id = None
        try:
            return dist.new_group(own, timeout=limit, backend=backend, use_local_synchronization=True)
        finally:
            world.bound_device_id = device
    if backend is None and device is not None and world._get_backend(device).supports_splitting:
        split = dist.split_group(split_ranks=groups)
        assert split is not None  # every rank is in one of them
        return split
    return dist.new_group(own, timeout=limit, backend=backend, use_local_synchronization=True)


def forget_groups() -> None:
    """Let go of all groups, after the process group that they belong to."""
    global _made_in
    _made.clear()
    _made_for_host.clear()
    _of_layouts.clear()
    _made_in = None
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

"""The process groups of a layout, created in one place, and the ``mpu`` object for DeepSpeed.

DeepSpeed knows about tensor parallelism, and gets one group of ``dp x cp x sp`` ranks as its data-parallel group: ZeRO
shards over it and gradients are averaged over it. Sequence sharding is ours, so DeepSpeed's own sequence parallelism
(whose gradients are ``sp`` times too large at ZeRO 0-2) stays off.

The number of groups that a rank creates depends on the axes, not on the number of ranks. If the process group is bound
to a device (NCCL), each axis is one ``split_group``: one ``ncclCommSplit`` that all ranks enter, each with its own
group. Otherwise (gloo, or NCCL without a device) only the members of a group create it. Axes with the same groups share
them, a group of all ranks is the default group, and all axes of size 1 share one single-rank group.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ds_trainer.parallel.layout import AXES, Coordinates, ParallelLayout, Strides, groups_of
from ds_trainer.utils import distributed
from ds_trainer.utils.collective_limit import collective_limit
from ds_trainer.utils.connections import tracked_connections
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.host_votes import reachable_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_groups: dict[Strides, ProcessGroup] = {}
_host_groups: dict[Strides, ProcessGroup | None] = {}
_layouts: dict[ParallelLayout, ParallelGroups] = {}
_default_group: ProcessGroup | None = None  # the default group that they belong to


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """This rank's process group along each axis and along combinations of axes.

    Attributes:
        layout: the layout.
        coordinates: this rank's coordinates.
        dp, cp, sp, tp: ranks that differ along one axis only.
        sequence: ``cp x sp`` ranks that hold the shards of a batch, in the order of :meth:`SequencePlan.order`.
        seq_data_parallel: ``dp x cp x sp`` ranks with the same parameters and different tokens.
        replica: ``cp x sp x tp`` ranks that work on the same samples.
        experts: ``ep`` ranks that hold different experts and exchange tokens.
        expert_replicas: ranks that hold the same experts.
        replica_host: the same ranks, for tensors in host memory (gloo), whatever the backend of the other groups.
        world_host: all ranks, for tensors in host memory; None if they cannot reach each other over gloo.
    """

    layout: ParallelLayout
    coordinates: Coordinates
    dp: ProcessGroup
    cp: ProcessGroup
    sp: ProcessGroup
    tp: ProcessGroup
    sequence: ProcessGroup
    seq_data_parallel: ProcessGroup
    replica: ProcessGroup
    experts: ProcessGroup
    expert_replicas: ProcessGroup
    replica_host: ProcessGroup
    world_host: ProcessGroup | None


_AXES_OF = {
    "dp": ("dp",),
    "cp": ("cp",),
    "sp": ("sp",),
    "tp": ("tp",),
    "sequence": ("cp", "sp"),
    "seq_data_parallel": ("dp", "cp", "sp"),
    "replica": ("cp", "sp", "tp"),
}


def parallel_groups(layout: ParallelLayout) -> ParallelGroups:
    """Returns the groups of ``layout``, creating missing ones. Collective if any is missing.

    Raises:
        ValueError: the process group and the layout have different numbers of ranks.
        ConfigError: the ranks of a replica cannot reach each other over gloo.
    """
    import torch.distributed as dist

    if distributed.world_size() != layout.world_size:
        raise ValueError(f"the layout is {layout.describe()}, but the process group has {distributed.world_size()}")
    if _default_group is dist.group.WORLD and layout in _layouts:
        return _layouts[layout]
    groups = {name: group_along(layout.strides(axes)) for name, axes in _AXES_OF.items()}
    groups["experts"] = group_along(layout.expert_strides)
    replicas = layout.expert_replica_strides
    groups["expert_replicas"] = group_along(replicas) if layout.ep > 1 else groups["seq_data_parallel"]
    groups["replica_host"] = groups["replica"]
    world_host: ProcessGroup | None = dist.group.WORLD
    if dist.get_backend() != "gloo":
        world_host = _host_group(layout.strides(AXES))
        if layout.replica_size > 1:
            replica_host = _host_group(layout.strides(_AXES_OF["replica"]))
            if replica_host is None:
                raise ConfigError(
                    f"The ranks of a replica ({layout.describe()}) exchange batches over gloo, which cannot connect "
                    "them. Set GLOO_SOCKET_IFNAME to the network interface between the machines, as for NCCL."
                )
            groups["replica_host"] = replica_host
    coordinates = layout.coordinates(distributed.rank())
    _layouts[layout] = ParallelGroups(layout, coordinates, **groups, world_host=world_host)
    distributed.use_host_group(world_host)
    return _layouts[layout]


def group_along(strides: Strides) -> ProcessGroup:
    """Returns this rank's group in the division of the world by ``strides``. Collective at the first call.

    Args:
        strides: the form of the groups (:meth:`ParallelLayout.strides`).
    """
    world = _world()
    if strides == (((1, world.size()),) if world.size() > 1 else ()):
        return world
    if strides not in _groups:
        with tracked_connections():
            _groups[strides] = _new_group(world, strides)
    return _groups[strides]


def _host_group(strides: Strides) -> ProcessGroup | None:
    """The same group over gloo, for tensors in host memory; None, on all ranks, if gloo cannot connect them."""
    world = _world()
    if strides not in _host_groups:
        with tracked_connections():
            _host_groups[strides] = reachable_group(lambda limit: _new_group(world, strides, "gloo", limit))
    return _host_groups[strides]


def _world() -> ProcessGroup:
    """The default group. Drops cached groups that belong to an earlier one."""
    global _default_group
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None  # the caller has a process group
    if _default_group is not world:
        forget_groups()
        _default_group = world
    return world


def _new_group(
    world: ProcessGroup, strides: Strides, backend: str | None = None, limit: timedelta | None = None
) -> ProcessGroup:
    import torch.distributed as dist

    limit = limit or collective_limit()  # from the first moment: NCCL's default is 10 minutes
    groups = groups_of(strides, world.size())
    local = next(ranks for ranks in groups if world.rank() in ranks)
    device = world.bound_device_id
    if len(local) == 1:
        # If the world is bound to a device, torch splits the communicator of all ranks at once. Otherwise a group of
        # one rank has no communicator until its first use, and then creates it alone.
        world.bound_device_id = None
        try:
            return dist.new_group(local, timeout=limit, backend=backend, use_local_synchronization=True)
        finally:
            world.bound_device_id = device
    if backend is None and device is not None and world._get_backend(device).supports_splitting:
        split = dist.split_group(split_ranks=groups, timeout=limit)
        assert split is not None  # every rank is in one of the groups
        return split
    return dist.new_group(local, timeout=limit, backend=backend, use_local_synchronization=True)


def forget_groups() -> None:
    """Drops all cached groups, after their process group was destroyed."""
    global _default_group
    _groups.clear()
    _host_groups.clear()
    _layouts.clear()
    _default_group = None
    distributed.use_host_group(None)


class Mpu:
    """The *model parallelism unit* that DeepSpeed queries for sizes, ranks and groups.

    The data-parallel *size* is that of the batch arithmetic (replicas that see different samples); the data-parallel
    *group* is the one DeepSpeed shards and averages over, which has more ranks if sequences are sharded.

    Source of the names: ``deepspeed.utils.groups`` and Megatron-LM's ``mpu``.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def get_data_parallel_world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._groups.layout.dp

    def get_data_parallel_rank(self) -> int:
        """Data-parallel rank of this process."""
        return self._groups.seq_data_parallel.rank()

    def get_data_parallel_group(self) -> ProcessGroup:
        """The data-parallel process group."""
        return self._groups.seq_data_parallel

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of the data-parallel group."""
        return self._groups.layout.group_of(distributed.rank(), _AXES_OF["seq_data_parallel"])

    def get_sequence_data_parallel_world_size(self) -> int:
        """Number of ranks over which ZeRO shards."""
        return self._groups.layout.seq_data_parallel_size

    def get_sequence_data_parallel_rank(self) -> int:
        """Rank of this process among those over which ZeRO shards."""
        return self._groups.seq_data_parallel.rank()

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """The process group over which ZeRO shards."""
        return self._groups.seq_data_parallel

    def get_model_parallel_world_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self._groups.layout.tp

    def get_model_parallel_rank(self) -> int:
        """Tensor-parallel rank of this process."""
        return self._groups.coordinates.tp

    def get_model_parallel_group(self) -> ProcessGroup:
        """The tensor-parallel process group."""
        return self._groups.tp

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the first member of the tensor-parallel group."""
        return distributed.rank() - self._groups.coordinates.tp

    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_group = get_model_parallel_group

"""The time limit of collectives: the same for every process group, from its creation on.

torch has limits of its own for groups that are created without one: 10 minutes with NCCL, 30 with gloo. DeepSpeed
creates groups that way inside ``deepspeed.initialize``, and uses them there. So the defaults of torch become the limit.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_limit = timedelta(minutes=30)


def collective_limit() -> timedelta:
    """The limit; torch's default before there is a group."""
    return _limit


def set_collective_limit(limit: timedelta) -> None:
    """Set the limit of all groups of this rank: those that exist, and those that will be created without a limit."""
    global _limit
    import torch.distributed as dist

    _limit = limit
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, limit)
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if dist.get_rank(group) >= 0:
                limit_group(group)


def limit_group(group: ProcessGroup) -> None:
    """Give ``group``, of which this rank is a member, the limit."""
    import torch.distributed as dist

    # From torch 2.14 on it is public, and the private name is deprecated.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(_limit, group)

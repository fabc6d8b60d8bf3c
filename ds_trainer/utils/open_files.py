"""The limit of open files, which includes connections.

Batch systems start processes with a soft limit of 1,024, which a process may raise to the hard limit. The process that
holds the rendezvous store has two connections to every rank. That is rank 0, or under torchrun its agent, which keeps
the limit that it was started with.
"""

from __future__ import annotations

import os
import resource

from ds_trainer.utils.store import outlives_ranks

STORE_CONNECTIONS = 2
"""Connections of each rank to the store: of the process group, and of the threads that watch other ranks."""
OTHER_FILES = 1024
"""Files for data, loader processes, checkpoints, logs, and the connections of NCCL and gloo."""

_inherited: int | None = None  # soft limit at the start of the process


def raise_open_file_limit() -> None:
    """Set the soft limit of open files to the hard limit."""
    global _inherited
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _inherited is None:
        _inherited = soft
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # macOS rejects an unlimited number of files; the soft limit is unchanged
            return


def open_file_problem(rank: int, world_size: int) -> tuple[str, bool] | None:
    """Why the limit is too low, and whether it prevents the rendezvous; None if it is high enough."""
    limit, held_by = _limit_of_store_holder()
    needed = STORE_CONNECTIONS * world_size
    if rank == 0 and limit < needed:
        limits = f"{limit:.0f}, but {held_by} holds {needed} connections of {world_size} ranks to the rendezvous store"
        return limits, True
    soft = _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    needed = OTHER_FILES + (needed if rank == 0 and held_by == "rank 0" else 0)
    if soft < needed:
        return f"{soft:.0f}, but rank {rank} of {world_size} may come to {needed}", False
    return None


def _limit_of_store_holder() -> tuple[float, str]:
    if outlives_ranks(os.environ):
        inherited = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if _inherited is None else _inherited
        return _number(inherited), "torchrun's agent"
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0]), "rank 0"


def _number(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)

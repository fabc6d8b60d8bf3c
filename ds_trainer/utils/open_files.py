"""How many files, and so connections, a process may have open.

Batch systems start processes with a soft limit of 1,024, which a process may raise to the hard one by itself. Rank 0
holds the rendezvous store, to which every rank has a few connections.
"""

from __future__ import annotations

import resource

STORE_CONNECTIONS = 2
"""Connections of each rank to the store: of the process group, and of the threads that look after other ranks."""
OTHER_FILES = 1024
"""Room for data, loading processes, checkpoints, logs and the connections of NCCL and gloo."""


def raise_open_file_limit() -> int:
    """Set the soft limit of open files to the hard one; the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # macOS takes no unlimited number of files
            return soft
        return hard
    return soft


def files_needed(world_size: int, holds_store: bool) -> int:
    """Open files that a rank of ``world_size`` may come to."""
    return OTHER_FILES + (STORE_CONNECTIONS * world_size if holds_store else 0)

"""A real cgroup with a limit of memory, for processes that a test starts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_trainer.utils import host_memory


@contextmanager
def memory_limit(limit: int) -> Iterator[Callable[[], None]]:
    """A cgroup below that of this process, with one in it that has no limit of its own; what puts a new process into
    that. Skips where none can be made."""
    places = host_memory._memory_cgroups(host_memory._CGROUPS, host_memory._MEMBERSHIP)
    version, own = next(((version, path) for version, path in places if path.is_dir()), (0, Path("/nowhere")))
    group = own / f"ds_trainer-{uuid.uuid4().hex[:8]}"
    try:
        if version == 2:
            (own / "cgroup.subtree_control").write_text("+memory")
        (group / "inner").mkdir(parents=True)
        (group / {1: "memory.limit_in_bytes", 2: "memory.max"}[version]).write_text(str(limit))
    except (OSError, KeyError) as error:
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    try:
        yield lambda: (group / "inner" / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        (group / "inner").rmdir()
        group.rmdir()

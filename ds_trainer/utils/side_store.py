"""A second connection of this rank to the rendezvous store, which all its threads share.

The connection of the process group itself may be busy: while NCCL or gloo connect ranks, it waits for values that
others have yet to write, and whoever uses it meanwhile waits too. Threads that look after other ranks (failures,
health, saves) use this one, in which nobody may wait: ``check`` before ``get``, never ``wait``. Each operation is one
short exchange, one after the other. The process that holds the store thus has two connections for each rank.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

_lock = threading.Lock()
_made: tuple[Any, Any] | None = None  # the store of a process group, and its clone


def side_store() -> Any:
    """The shared connection beside that of the process group; made at the first call for each process group."""
    global _made
    default: Any = dist.distributed_c10d._get_default_store()
    with _lock:
        if _made is None or _made[0] is not default:
            _made = default, default.clone()
        return _made[1]

"""The TCP connections of the process groups: known, so that they can be ended when a rank fails.

gloo closes its connections when the last reference to a group is gone, which nobody can promise: a model, a closure or
a C++ object may hold one. A rank that waits for another one in gloo wakes up when the connection ends, not before.

gloo connects two ranks when they first exchange something (``TORCH_GLOO_LAZY_INIT``), so that it is not enough to look
when a group is made. Each rank listens at an address of its own for each group: a connection is gloo's if this rank
accepted it there, or if it leads to where another rank listens. Ranks write their addresses into the store of the
process group, and read them only when connections are to be ended.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DESCRIPTORS = Path("/proc/self/fd")  # Linux; elsewhere nothing is noted
_LISTENERS = "ds_trainer/listeners"
Address = tuple[str, int]
_noted: set[str] = set()
_own: set[Address] = set()


@contextmanager
def noted_connections() -> Iterator[None]:
    """Note the sockets that are made in this block, and tell the other ranks where this one listens now."""
    before = set(_sockets().values())
    yield
    made = {descriptor: name for descriptor, name in _sockets().items() if name not in before}
    _noted.update(made.values())
    listeners = {address for descriptor in made if (address := _listens_at(descriptor)) is not None}
    _own.update(listeners)
    _publish(listeners)


def end_connections(store_port: int, store: Any = None) -> int:
    """End all connections of process groups but those to the rendezvous store, and forget them; how many they were.

    Args:
        store_port: port of the store, which the ranks still need.
        store: of the process group, where ranks have written where they listen.
    """
    ended = 0
    known = _own | _published(store)
    for descriptor, name in _sockets().items():
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                ends = {connection.getsockname()[:2], connection.getpeername()[:2]}
                if store_port not in {end[1] for end in ends} and (name in _noted or ends & known):
                    connection.shutdown(socket.SHUT_RDWR)
                    ended += 1
            except OSError:  # listening, or closed meanwhile: nobody waits in it
                continue
    _noted.clear()
    _own.clear()
    return ended


def _publish(listeners: set[Address]) -> None:
    import torch.distributed as dist

    if listeners and dist.is_initialized() and dist.get_world_size() > 1:
        text = "".join(f"{host} {port}\n" for host, port in sorted(listeners))
        store: Any = dist.distributed_c10d._get_default_store()
        store.append(_LISTENERS, text)


def _published(store: Any) -> set[Address]:
    """Where all ranks listen: some 25 bytes a rank and group, read at a failure only."""
    if store is None or not store.check([_LISTENERS]):
        return set()
    lines = (line.split() for line in store.get(_LISTENERS).decode().splitlines())
    return {(host, int(port)) for host, port in lines}


def _listens_at(descriptor: int) -> Address | None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        host, port = connection.getsockname()[:2]
        return str(host), int(port)


def _sockets() -> dict[int, str]:
    """The open sockets of this process: descriptor to name (``socket:[inode]``)."""
    found = {}
    for entry in _DESCRIPTORS.glob("*") if _DESCRIPTORS.is_dir() else ():
        try:
            name = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:"):
            found[int(entry.name)] = name
    return found

"""The TCP connections of the process groups: noted when they are made, so that they can be ended when a rank fails.

gloo closes its connections when the last reference to a group is gone, which nobody can promise: a model, a closure or
a C++ object may hold one. A rank that waits for another one in gloo wakes up when the connection ends, not before.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")  # Linux; elsewhere nothing is noted
_noted: set[str] = set()


@contextmanager
def noted_connections() -> Iterator[None]:
    """Note the sockets that are made in this block."""
    before = set(_sockets().values())
    yield
    _noted.update(set(_sockets().values()) - before)


def end_connections(store_port: int) -> int:
    """End all noted connections but those to the rendezvous store, and forget them; how many they were.

    Args:
        store_port: port of the store, which the ranks still need.
    """
    ended = 0
    for descriptor, name in _sockets().items():
        if name not in _noted:
            continue
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                ports = {connection.getsockname()[1], connection.getpeername()[1]}
                if store_port not in ports:
                    connection.shutdown(socket.SHUT_RDWR)
                    ended += 1
            except (OSError, IndexError):  # listening, closed meanwhile, or no TCP: nobody waits in it
                continue
    _noted.clear()
    return ended


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

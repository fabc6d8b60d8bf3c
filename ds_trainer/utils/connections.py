"""Tracks the TCP connections of process groups, so that they can be closed when a rank fails.

gloo closes its connections with the last reference to a group, which cannot be guaranteed: a model, a closure or a C++
object may hold one. A rank that waits for another one in gloo wakes up when the connection is closed, not before.

gloo connects two ranks at their first exchange (``TORCH_GLOO_LAZY_INIT``), so recording connections when a group is
created is not enough. Each rank listens on an address of its own for each group: a connection belongs to gloo if this
rank accepted it there, or if its other end is the listening address of another rank. Ranks publish these addresses in
the rendezvous store, and read them only when connections are to be closed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_trainer.utils.store import RankStore, group_store

_DESCRIPTORS = Path("/proc/self/fd")  # Linux; on other systems nothing is tracked
_PREFIX = "ds_trainer/connections"
Address = tuple[str, int]
_tracked: set[str] = set()
_listening: set[Address] = set()


@contextmanager
def tracked_connections() -> Iterator[None]:
    """Record the sockets that are opened in this block, and publish the addresses on which this rank listens."""
    before = set(_sockets().values())
    yield
    made = {descriptor: name for descriptor, name in _sockets().items() if name not in before}
    _tracked.update(made.values())
    listeners = {address for descriptor in made if (address := _listening_address(descriptor)) is not None}
    _listening.update(listeners)
    if listeners and dist.is_initialized() and dist.get_world_size() > 1:
        RankStore(_PREFIX, group_store()).append("listeners", sorted(listeners))


def end_connections(store_port: int, store: Any = None) -> int:
    """Close all connections of process groups except those to the rendezvous store; returns their number.

    Args:
        store_port: port of the store, which the ranks still need.
        store: the process group's store, in which the ranks have published their addresses.
    """
    ended = 0
    known = _listening | _published(store)
    for descriptor, name in _sockets().items():
        with _internet_socket(descriptor) as connection:
            if connection is None:
                continue
            try:
                ends = {connection.getsockname()[:2], connection.getpeername()[:2]}
                if store_port not in {end[1] for end in ends} and (name in _tracked or ends & known):
                    connection.shutdown(socket.SHUT_RDWR)
                    ended += 1
            except OSError:  # a listening socket, or closed in the meantime: no rank waits in it
                continue
    _tracked.clear()
    _listening.clear()
    return ended


def _published(store: Any) -> set[Address]:
    """The addresses on which ranks listen: about 25 bytes per rank and group, read only after a failure."""
    if store is None:
        return set()
    return {(host, port) for listeners in RankStore(_PREFIX, store).get_list("listeners") for host, port in listeners}


def _listening_address(descriptor: int) -> Address | None:
    with _internet_socket(descriptor) as connection:
        if connection is None or not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        host, port = connection.getsockname()[:2]
        return str(host), int(port)


@contextmanager
def _internet_socket(descriptor: int) -> Iterator[socket.socket | None]:
    """A second handle on a TCP socket; None for another kind of socket, and for one that a thread closed in between."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # the number was given to a file in between
        os.close(copy)
        yield None
        return
    with connection:
        yield connection if connection.family in (socket.AF_INET, socket.AF_INET6) else None


def _sockets() -> dict[int, str]:
    """The open sockets of this process: descriptor to name (``socket:[inode]``)."""
    sockets = {}
    for entry in _DESCRIPTORS.glob("*") if _DESCRIPTORS.is_dir() else ():
        try:
            name = os.readlink(entry)
        except OSError:  # closed in the meantime
            continue
        if name.startswith("socket:"):
            sockets[int(entry.name)] = name
    return sockets

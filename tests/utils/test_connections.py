"""gloo connects ranks at their first exchange; a rank that fails closes its connections, whenever they were made."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ds_trainer.utils import connections as connections_module
from ds_trainer.utils import store as module
from ds_trainer.utils.open_files import STORE_CONNECTIONS
from ds_trainer.utils.ranks import free_port
from ds_trainer.utils.store import side_store
from tests.support.pool import pool

ROOT = Path(__file__).parents[2]


def connections(with_store: bool = False) -> int:
    """Established TCP connections of this process; those to the rendezvous store only on request."""
    store, process = int(os.environ["MASTER_PORT"]), psutil.Process()
    tcp = process.net_connections if hasattr(process, "net_connections") else process.connections  # psutil 5
    found = [one for one in tcp("tcp") if one.status == psutil.CONN_ESTABLISHED]
    return sum(with_store or store not in (one.laddr.port, one.raddr.port) for one in found)


def sockets_of_groups(lazy: str) -> list[tuple[int, int]]:
    """Connections of a group of all ranks and of one of half of them: when created, and after an all-reduce."""
    before = os.environ["TORCH_GLOO_LAZY_INIT"]  # set by whoever started the process group
    assert before == "1"
    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    try:
        for halves in (1, 2):
            gc.collect()
            dist.barrier()
            dist.barrier()
            time.sleep(1.0)  # what the barrier has connected is there on both sides
            own, start = None, connections()
            for half in range(halves):
                ranks = list(range(half, world, halves))
                group = dist.new_group(ranks, backend="gloo")
                own = group if rank in ranks else own
            made = connections() - start
            dist.barrier()  # before the first rank connects to another one
            total = torch.tensor([1])
            dist.all_reduce(total, group=own)
            assert int(total) == world // halves
            found.append((made, connections() - start))
    finally:
        os.environ["TORCH_GLOO_LAZY_INIT"] = before
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_connect_at_their_first_exchange(world: int) -> None:
    for whole, half in pool(world).run(sockets_of_groups, "1"):
        assert (whole[0], half[0]) == (0, 0), "nothing is connected when a group is made"
        assert whole[1] <= 2 * (world - 1).bit_length() and half[1] <= 2 * (world // 2 - 1).bit_length()


def test_without_it_every_rank_is_connected_to_every_other() -> None:
    """Negative control."""
    found = pool(8).run(sockets_of_groups, "0")
    assert [(whole[0], half[0]) for whole, half in found] == [(7, 3)] * 8


RANK = """
    import os, sys, time, torch, torch.distributed as dist
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.utils import failures
    from ds_trainer.utils.connections import end_connections

    info = start_process_group("cpu")
    failures.watch_peers()
    held = dist.group.WORLD  # as a model or a closure would: gloo does not close its connections
    total = torch.ones(1)
    dist.all_reduce(total)
    if info.rank == 1:
        time.sleep(1.0)  # the others wait by now
        print("ended", end_connections(info.master_port, failures.store()), flush=True)
        time.sleep(15.0)
        os._exit(0)
    began = time.monotonic()
    try:
        dist.all_reduce(total)
    except RuntimeError:
        print("awake", time.monotonic() - began, flush=True)
    os._exit(0)
"""


# A rank dies before the other one has exchanged anything with it since the start.
DIES = """
    import os, signal, time, torch, torch.distributed as dist
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.utils import failures
    from ds_trainer.utils.store import group_store
    from tests.utils.test_connections import connections

    info = start_process_group("cpu")
    failures.watch_peers()
    met = connections()
    store = group_store()
    if info.rank == 1:
        store.get("ready")  # the other rank has seen it; the launcher ends earlier hangs
        store.set("going", "")
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("ready", "")
    store.get("going")
    time.sleep(2.0)
    began = time.monotonic()

    @failures.fails_together
    def work():
        dist.all_reduce(torch.ones(1))

    try:
        work()
    except RuntimeError:
        print("failed", time.monotonic() - began, met, flush=True)
    os._exit(0)
"""


def run(script: str, world: int) -> list[str]:
    """What each rank prints."""
    code = textwrap.dedent(script)
    meet = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in map(str, range(world)):
        own = {**os.environ, **meet, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)}
        ranks.append(subprocess.Popen([sys.executable, "-c", code], env=own, stdout=subprocess.PIPE, text=True))
    try:
        return [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.extended
def test_later_connections_are_closed_too() -> None:
    first, second, third = run(RANK, 3)
    assert int(second.split()[1]) >= 2
    for output in (first, third):
        assert output.startswith("awake") and float(output.split()[1]) < 10


@pytest.mark.extended
def test_a_rank_that_dies_before_the_first_exchange_causes_no_hang() -> None:
    first, _ = run(DIES, 2)
    assert first.startswith("failed") and float(first.split()[1]) < 20
    assert int(first.split()[2]) >= 1, "ranks are connected when the group is made: without that one of two runs hangs"


@pytest.mark.parametrize("then", ["nothing", "a file", "a pipe", "a local socket"])
def test_a_socket_that_a_thread_closes_meanwhile_is_passed_over(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may close a socket, and the number may be given to something else, after the list was made."""
    seen = connections_module._sockets
    opened: list[Any] = []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = listening.getsockname()
        closed = [socket.socket() for _ in range(2)]

        def list_and_close() -> dict[int, str]:
            found = seen()
            while closed and closed[0].fileno() in found:
                number = closed[0].fileno()
                closed.pop(0).close()
                if then == "a file":
                    opened.append(open(__file__))  # noqa: SIM115
                elif then == "a pipe":
                    opened.extend(os.fdopen(end) for end in os.pipe())
                elif then == "a local socket":
                    opened.append(socket.socket(socket.AF_UNIX))
                assert then == "nothing" or number in [one.fileno() for one in opened]
            return found

        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(connections_module, "_sockets", list_and_close)
        for known in ("_tracked", "_listening"):  # of earlier tests in this process
            monkeypatch.setattr(connections_module, known, set())
        listened = [connections_module._listening_address(number) for number in list_and_close()]
        ended = connections_module.end_connections(store_port=0)
        after = len(os.listdir("/proc/self/fd"))
    assert address in listened
    assert ended == 0
    assert after == before - 2 + len(opened)  # no handle is left behind
    for one in opened:
        one.close()


def test_threads_share_one_connection_to_the_store() -> None:
    assert pool(2).run(stores_of_threads) == [1, 1]
    assert STORE_CONNECTIONS == 2


def stores_of_threads() -> int:
    """Connections that failures, health and saves use in addition to that of the process group."""
    from ds_trainer.checkpoint.background.store_barrier import StoreBarrier
    from ds_trainer.monitor.health.status_board import StatusBoard
    from ds_trainer.utils.failures import watch_peers

    module._side = None  # of earlier cases
    side_store()
    watch_peers()
    dist.barrier()  # rank 0 has a connection to the store of each rank
    before = connections(with_store=True)
    users: list[Any] = [StoreBarrier(), StatusBoard()]
    assert all(user._store.connection._store is side_store() for user in users)
    distinct = {id(user._store.connection._store) for user in users}
    dist.barrier()
    assert connections(with_store=True) == before
    return len(distinct)


def test_values_in_the_store_are_never_unpickled() -> None:
    """Anyone who can reach the port may write to the store, and unpickling runs code."""
    pool(2).run(rejects_a_pickle)


def rejects_a_pickle() -> None:
    from ds_trainer.checkpoint.background.store_barrier import StoreBarrier

    barrier, values = StoreBarrier(), ["Zürich\udc80", 1, None, [True]]
    assert barrier.gather_to_main(values) == (None if barrier.rank else [values, values])
    assert barrier.broadcast_object(values) == values
    if barrier.rank:
        store, turn = barrier._store, barrier._turn + 1
        assert store is not None
        store.connection.set(f"{store.prefix}/{turn}/1", b"\x80\x04\x95")
        store.add(f"{turn}/count")
        return
    try:
        barrier.gather_to_main(values)
    except ValueError:
        return
    raise AssertionError("a pickle was read")

"""The one client of the rendezvous store: JSON values, short exchanges, waits that end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_trainer.engine.zero3 import deviations as deviations_module
from ds_trainer.engine.zero3.deviations import Deviations
from ds_trainer.monitor.health import watchdog as watchdog_module
from ds_trainer.monitor.health.heartbeat import Limit
from ds_trainer.monitor.health.status_board import StatusBoard
from ds_trainer.monitor.health.verdict import RankReport
from ds_trainer.monitor.health.watchdog import Watchdog, WatchdogRules
from ds_trainer.utils import failures
from ds_trainer.utils import store as store_module
from ds_trainer.utils.store import RankStore, agree_on_name, expiry, poll

PACKAGE = Path(__file__).parents[2] / "ds_trainer"


class NeverBlocking:
    """An in-process store without ``wait``, whose ``get`` fails instead of waiting for a value."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=0.1))
        self.polls = 0

    def __getattr__(self, name: str) -> Any:
        assert name != "wait"
        self.polls += name in ("check", "add")
        return getattr(self.store, name)


@pytest.fixture
def connection() -> NeverBlocking:
    return NeverBlocking()


def test_values_are_json_below_a_prefix(connection: NeverBlocking) -> None:
    store, other = RankStore("a", connection), RankStore("b", connection)
    value = {"text": "Zürich\udc80\n", "list": [1, None, True]}
    store.set("key", value)
    assert store.get("key") == value and store.check("key")
    assert other.get("key") is None and not other.check("key")
    store.set("next", 2)
    assert store.get_all(["key", "next"]) == [value, 2]
    assert store.get_all(["key", "missing"]) is None
    store.delete("key", "next")
    assert not store.check("key") and not store.check("next")


def test_the_first_value_is_kept(connection: NeverBlocking) -> None:
    store = RankStore("a", connection)
    assert store.set_first("leader", [0, "host"])
    assert not store.set_first("leader", [1, "host"])
    assert store.set_first("leader", [0, "host"]), "the same value is as good"
    assert store.get("leader") == [0, "host"]


def test_lists_and_counters(connection: NeverBlocking) -> None:
    store = RankStore("a", connection)
    assert store.get_list("votes") == []
    for vote in ([1, 2], [3, 4]):
        store.append("votes", vote)
    assert store.get_list("votes") == [[1, 2], [3, 4]]
    assert (store.add("count"), store.add("count", 2), store.add("count", 0)) == (1, 3, 3)


def test_a_value_is_awaited_until_the_time_limit(connection: NeverBlocking) -> None:
    store = RankStore("a", connection)
    with pytest.raises(TimeoutError, match="no rank has written a/key within the time limit"):
        store.wait("key", expiry(0.2))
    threading.Timer(0.3, store.set, ("key", "late")).start()
    assert store.wait("key", expiry(20.0)) == "late"
    assert store.wait("key", expiry(0.0)) == "late", "what is there needs no time"


def test_a_count_is_awaited_until_the_time_limit(connection: NeverBlocking) -> None:
    store = RankStore("a", connection)
    store.add("arrived")
    assert store.wait_for_count("arrived", 2, expiry(0.2)) == 1
    threading.Timer(0.2, store.add, ("arrived",)).start()
    assert store.wait_for_count("arrived", 2, expiry(20.0)) == 2


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rank_0_gathers_in_rank_order(ranks: int, connection: NeverBlocking) -> None:
    def rank(number: int) -> list[Any] | None:
        time.sleep(0.01 * (ranks - number))
        return RankStore("a", connection, ranks).gather("turn", {"rank": number}, number, expiry(20.0))

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(rank, range(ranks)))
    assert found == [[{"rank": number} for number in range(ranks)], *[None] * (ranks - 1)]


def test_a_rank_that_is_missing_is_an_error_on_rank_0(connection: NeverBlocking) -> None:
    RankStore("a", connection, 3).gather("turn", "here", 1)
    with pytest.raises(TimeoutError, match="1 of 2 other ranks"):
        RankStore("a", connection, 3).gather("turn", "here", 0, expiry(0.2))


class Clock:
    """In place of the module ``time``: a pause takes no time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.time = self.perf_counter = self.monotonic = lambda: self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait_in_poll(store: RankStore) -> None:
    assert not poll(lambda: store.check("x"), expiry(40.0), store._ranks)


def wait_for_a_report(store: RankStore) -> None:
    """The ranks that did not declare a hang wait for the one that did."""
    board, watchdog = object.__new__(StatusBoard), object.__new__(Watchdog)
    board._store, watchdog._board = store, board
    watchdog.rules = WatchdogRules(Limit(600.0, 5.0, 0.0), True, 5.0, 15.0)
    assert watchdog._outcome(1) is True, "without an answer, as configured"


def wait_for_a_cause(store: RankStore) -> None:
    """The connections of all ranks have broken, and each looks for the rank that failed."""
    watch = object.__new__(failures._Watch)
    watch.notes, watch.generation, watch.rank = store, 0, 1
    assert watch.peer_failure(wait=40.0) is None


def wait_for_an_attempt(store: RankStore) -> None:
    with pytest.raises(TimeoutError):
        agree_on_name(store.connection, 1, store._ranks, 40.0)


def wait_for_a_deviation(store: RankStore) -> None:
    deviations = Deviations("x", store._ranks, lambda: (0, 0), dict)
    deviations._store = store.connection
    store.connection._store.limit = 200
    with pytest.raises(EOFError):
        deviations.ask((0, 0), 1)
    deviations.close()


class Counted(NeverBlocking):
    """Counts all operations, and ends a wait without a limit."""

    limit = 10**9

    def __getattr__(self, name: str) -> Any:
        self.polls += 1
        if self.polls > self.limit:
            raise EOFError
        return getattr(self.store, name)


WAITS = [wait_in_poll, wait_for_a_report, wait_for_a_cause, wait_for_an_attempt, wait_for_a_deviation]


@pytest.mark.parametrize("ranks", [1024, 4096])
@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_the_load_of_the_store_is_bounded_whatever_the_number_of_ranks(
    wait: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks together do at most 2,000 operations a second, except in the first second of a wait."""
    clock = Clock()
    for module in (store_module, watchdog_module, failures, deviations_module):
        monkeypatch.setattr(module, "time", clock)
    connection = Counted()
    wait(RankStore("a", connection, ranks))
    assert clock.now > 30
    first = 12  # pauses that double, from a millisecond on
    assert ranks * (connection.polls - first) / clock.now <= 2_500


@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("ranks", [8, 1024, 4096])
def test_the_reports_of_a_hang_are_read_at_once(ranks: int, missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few exchanges, and some for each rank that does not answer. Each rank was two in every look before."""
    monkeypatch.setattr(store_module, "time", Clock())
    connection = Counted()
    board, watchdog = object.__new__(StatusBoard), object.__new__(Watchdog)
    board._store, board.keeper = RankStore("a", connection, ranks), ("here", 1)
    watchdog._board, watchdog.world_size, watchdog._host = board, ranks, "here"
    watchdog.rules = WatchdogRules(Limit(600.0, 5.0, 0.0), True, 5.0, 15.0)
    for rank in range(ranks - missing):
        one = RankReport(rank=rank, host="there", pid=1, ended=rank == 3)
        board.put(f"report/1/{rank}" if rank != 3 else "pulse/3", one.to_dict())
        board.append("reported/1" if rank != 3 else "ended", rank)
    written, connection.polls = connection.polls, 0
    reports = watchdog._collect(1)
    assert written >= 2 * (ranks - missing) and sorted(reports) == list(range(ranks))
    assert [rank for rank, one in reports.items() if one.silent] == list(range(ranks - missing, ranks))
    assert reports[3].ended and not reports[4].ended
    looks = 1 if missing == 0 else 160  # in 15 seconds
    assert connection.polls <= 4 * looks + 6 + 6 * missing


@pytest.mark.parametrize(("ranks", "limit", "most"), [(8, 600.0, 5.0), (1024, 600.0, 5.0), (4096, 600.0, 13.0)])
def test_ranks_that_watch_each_other_share_the_store(ranks: int, limit: float, most: float) -> None:
    rules = WatchdogRules.of(Limit(limit, 5.0, 0.0), False, lambda: None, ranks)
    assert 5.0 <= rules.poll <= most and 6 * ranks / rules.poll <= 2_000
    assert rules.answer > 2 * rules.poll


def test_what_is_there_soon_is_seen_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(store_module, "time", clock)
    for soon in (0.0, 0.01, 0.1):
        clock.now = 0.0
        assert poll(lambda soon=soon: clock.now >= soon, expiry(40.0), 4096)  # type: ignore[misc]
        assert clock.now <= 2 * soon + 0.001


def test_torchs_private_name_is_used_in_one_file() -> None:
    users = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "_get_default_store" in path.read_text()
    }
    assert users == {"utils/store.py"}


ENDS_DURING_OPERATIONS = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from ds_trainer.utils.store import RankStore
from ds_trainer.utils.threads import new_thread

store = RankStore("a", dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timedelta(seconds=30)), ranks=2)

def watch():
    while True:
        store.check("key")

for number in range(3):
    new_thread(watch, name=f"watch-{number}").start()
time.sleep(0.2)
sys.exit(75)
"""


def test_a_process_that_ends_while_threads_use_the_store_keeps_its_exit_code() -> None:
    """Without the guard it is SIGABRT, whatever the program has returned."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    command = [sys.executable, "-c", ENDS_DURING_OPERATIONS, str(server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (75, "")


def test_an_operation_that_never_ends_does_not_hold_the_exit_up() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Hangs:
        def check(self, keys: list[str]) -> bool:
            entered.set()
            return leave.wait(60)

    guarded = store_module.GuardedStore(Hangs())
    threading.Thread(target=guarded.check, args=(["a"],)).start()
    assert entered.wait(20)
    began = time.monotonic()
    guarded.close(0.2)
    assert 0.2 <= time.monotonic() - began < 50
    leave.set()

"""The one client of the rendezvous store: JSON values, short exchanges, waits that end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_trainer.utils.store import RankStore, expiry, poll

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


def test_pauses_grow_with_the_number_of_ranks() -> None:
    """All ranks together poll at most 10,000 times per second, and each at most ten times after a while."""

    def polls(ranks: int) -> int:
        count = 0

        def reached() -> bool:
            nonlocal count
            count += 1
            return False

        assert not poll(reached, expiry(1.0), ranks)
        return count

    assert polls(1) <= 20
    assert polls(5000) <= 12


def test_torchs_private_name_is_used_in_one_file() -> None:
    users = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "_get_default_store" in path.read_text()
    }
    assert users == {"utils/store.py"}

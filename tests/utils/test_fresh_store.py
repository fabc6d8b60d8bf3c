"""Restarted ranks agree on a new name in the store of dead ranks, whatever values those have left."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ds_trainer.utils import torch_group
from ds_trainer.utils.ranks import RankInfo, free_port
from ds_trainer.utils.store import agree_on_name, fresh_store, outlives_ranks

WORLD = 4


def attempt(store: Any, chance: random.Random, ranks: range = range(WORLD), seconds: float = 20.0) -> list[str | None]:
    """The names that ranks agree on, started at slightly different times; None after a timeout."""

    def one(rank: int, delay: float) -> str | None:
        time.sleep(delay)
        try:
            return agree_on_name(store, rank, WORLD, seconds)
        except TimeoutError:
            return None

    with ThreadPoolExecutor(len(ranks)) as threads:
        waiting = [threads.submit(one, rank, chance.uniform(0.0, 0.05)) for rank in ranks]
        return [future.result() for future in waiting]


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(5))
def test_every_attempt_has_a_unique_name(seed: int) -> None:
    """Even after attempts in which the first or the last ranks died before they agreed."""
    chance = random.Random(seed)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    found = []
    for _ in range(6):
        if chance.random() < 0.5:
            some = chance.choice([range(1), range(WORLD - 1), range(1, WORLD), range(WORLD - 1, WORLD)])
            died = attempt(store, chance, some, 0.15)
            assert died == [None] * len(some), "not without the others"
        names = attempt(store, chance)
        assert None not in names and len(set(names)) == 1
        found.append(names[0])
    assert len(set(found)) == 6


class Counted:
    """A store that counts operations and transferred values."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls, self.values = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls += 1
            self.values += len(args[0]) if isinstance(args[0], list) else 1
            return getattr(self._store, name)(*args)

        return call


def test_only_rank_0_reads_a_value_per_rank() -> None:
    world, store = 256, dist.HashStore()
    for rank in range(1, world - 1):
        store.set(f"ds_trainer/attempt/token/{rank}", f"word {rank}")

    def others(name: str) -> None:
        store.add(f"ds_trainer/attempt/{name}/agreed", world - 2)

    main, last = Counted(store), Counted(store)
    with ThreadPoolExecutor(2) as threads:
        found = [
            threads.submit(agree_on_name, store, rank, world, 20.0) for rank, store in ((0, main), (world - 1, last))
        ]
        while not store.check([f"ds_trainer/attempt/name/word {world - 2}"]):
            time.sleep(0.01)
        others(store.get(f"ds_trainer/attempt/name/word {world - 2}").decode())
        assert found[0].result() == found[1].result()
    assert main.values > world
    assert last.values == last.calls < 100


def test_nothing_of_an_earlier_attempt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, whose agent holds the store. Negative control: the store as torch returns it."""
    port, soon = free_port(), timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    first = fresh_store(0, 1, soon)
    first.set("failed", "rank 1")
    assert first.check(["failed"])
    assert not fresh_store(0, 1, soon).check(["failed"])
    plain, again = (next(dist.rendezvous("env://", 0, 1, timeout=soon))[0] for _ in range(2))
    plain.set("failed", "rank 1")
    assert plain.check(["failed"]), "and so it has arrived"
    assert again.check(["failed"])
    del server


def test_process_groups_under_torchrun_begin_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, started twice against the same store: the second pair reads nothing of the first."""
    port, soon = free_port(), timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks = [RankInfo(rank, 2, rank, "127.0.0.1", port, "environment") for rank in range(2)]
    monkeypatch.setattr(torch_group, "_numbers", itertools.repeat(0))  # a restarted process counts from the beginning
    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(lambda info: torch_group.first_store(info, soon), ranks)
        first.set("failed", "rank 1")
        assert other.check(["failed"])
        again = list(threads.map(lambda info: torch_group.first_store(info, soon), ranks))
    assert not any(store.check(["failed"]) for store in again)
    del server


def test_the_store_of_torchrun_outlives_its_ranks() -> None:
    assert outlives_ranks({"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not outlives_ranks({"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert not outlives_ranks({"RANK": "0", "WORLD_SIZE": "2"})

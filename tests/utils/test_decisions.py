"""Decisions of all ranks: the largest vote, in the same order on every rank."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_trainer import TrainingArguments
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.collective_limit import collective_limit, set_collective_limit
from ds_trainer.utils.store import RankStore
from tests.support.forks import in_a_fork
from tests.support.pool import pool

RANKS = 4


def decisions() -> dict[str, Any]:
    rank = distributed.rank()
    votes = [rank, -rank, 7 if rank == 2 else 0]
    begun = distributed.Agreement(torch.tensor(votes))
    groups = parallel_groups(ParallelLayout(RANKS, tp=2))
    return {
        "agreed": distributed.agree(torch.tensor(votes)),
        "begun": [begun.result(), begun.result()],
        "largest": distributed.largest(torch.tensor([rank + 0.5])).tolist(),
        "alike": [distributed.alike("a"), distributed.alike("b" if rank == 1 else "a"), distributed.alike(str(rank))],
        "reversed": distributed.alike("b" if rank != 1 else "a"),
        "all": distributed.gather_objects({"rank": rank}),
        "main": distributed.gather_to_main("x" * rank),
        "long": distributed.gather_to_main(list(range(1000 * (rank % 2)))),
        "told": distributed.broadcast_object(f"said by {rank}"),
        "by store": [distributed.broadcast_from_main([rank, turn]) for turn in range(2)],
        "kept": kept(),
        "sizes": [distributed.group_size(), distributed.group_size(groups.tp), distributed.world_size()],
        "sum": summed(rank, groups.tp),
        "late": late(rank),
    }


def kept() -> int:
    """How many keys of broadcasts are still in the store once all ranks have read them."""
    distributed.barrier()
    store = RankStore("ds_trainer/broadcasts")
    return sum(store.check(key) for turn in range(100) for key in (str(turn), f"{turn}/read"))


def late(rank: int) -> list[int]:
    """What the first ranks read at once, while the last one has not voted yet."""
    distributed.barrier()
    if rank == RANKS - 1:
        time.sleep(0.5)
    return distributed.Agreement(torch.tensor([rank])).result()


def summed(rank: int, group: Any) -> list[int]:
    tensors = [torch.tensor(10**rank), torch.tensor(10**rank)]
    distributed.all_reduce_sum(tensors[0])
    distributed.all_reduce_sum(tensors[1], group=group)
    return [int(tensor) for tensor in tensors]


def test_all_ranks_get_the_same_decision() -> None:
    results = pool(RANKS).run(decisions)
    for rank, found in enumerate(results):
        assert found["agreed"] == [3, 0, 7]
        assert found["begun"] == [[3, 0, 7]] * 2
        assert found["largest"] == [3.5]
        assert found["alike"] == [True, False, False] and found["reversed"] is False
        assert found["all"] == [{"rank": other} for other in range(RANKS)]
        assert found["main"] == (["", "x", "xx", "xxx"] if rank == 0 else None)
        assert found["long"] == ([list(range(1000 * (other % 2))) for other in range(RANKS)] if rank == 0 else None)
        assert found["told"] == "said by 0"
        assert found["by store"] == [[0, 0], [0, 1]]
        assert found["kept"] == 0
        assert found["sizes"] == [4, 2, 4]
        assert found["late"] == [RANKS - 1]
        assert found["sum"] == [1111, 11 if rank < 2 else 1100]


def test_one_process_gets_its_own_decision() -> None:
    assert distributed.agree(torch.tensor([3, -1])) == [3, -1]
    assert distributed.Agreement(torch.tensor([3])).result() == [3]
    assert distributed.alike("a") and distributed.gather_objects(1) == distributed.gather_to_main(1) == [1]
    assert distributed.broadcast_object("a") == distributed.broadcast_from_main("a") == "a"
    assert distributed.group_size() == 1 and distributed.all_reduce_sum(torch.tensor(1)) is None


# -- what an exchange costs, and how long it waits ---------------------------------------------------------------------


def exchanges_of_all_sizes() -> dict[int, tuple[list[int], list[list[float]]]]:
    """Votes and gathers among the first 1, 2 ... 8 ranks: one more each time, so also numbers that are no powers."""
    found = {}
    for size in range(1, dist.get_world_size() + 1):
        group = dist.new_group(list(range(size)))
        rank = distributed.rank()
        if rank < size:
            largest = distributed._largest_of(
                torch.tensor([rank, -rank, 7 * (rank == 1)]), group, timedelta(seconds=60)
            )
            rows = distributed._rows_of(torch.tensor([rank, rank + 0.5]), group, timedelta(seconds=60))
            found[size] = largest.tolist(), rows.tolist()
    return found


def test_votes_and_gathers_of_any_number_of_ranks() -> None:
    for rank, found in enumerate(pool(8).run(exchanges_of_all_sizes)):
        assert list(found) == list(range(rank + 1, 9))
        for size, (largest, rows) in found.items():
            assert largest == [size - 1, 0, 7 * (size > 1)]
            assert rows == [[other, other + 0.5] for other in range(size)]


def messages_of(ranks: int) -> dict[str, list[int]]:
    """The distances of all messages that rank 0 of many sends for each kind of exchange."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    distances: list[int] = []
    real = dist.isend

    def isend(*values: Any, group_dst: int, **rest: Any) -> Any:
        distances.append(group_dst)
        return real(*values, group_dst=group_dst, **rest)

    dist.isend = isend
    dist.all_reduce = dist.all_gather = dist.all_gather_object = dist.barrier = None  # rings
    kinds: dict[str, Any] = {
        "vote": lambda: distributed.agree(torch.tensor([1, 2])),
        "barrier": distributed.barrier,
        "gather": lambda: distributed.gather_numbers(torch.tensor([1, 2])),
        "objects": lambda: distributed.gather_objects("x"),
    }
    found = {}
    for kind, exchange in kinds.items():
        distances.clear()
        exchange()
        found[kind] = list(distances)
    return found


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (8, 3), (1000, 10), (1024, 10), (4096, 12)])
def test_the_messages_of_a_rank_grow_with_the_logarithm_of_the_ranks(ranks: int, rounds: int) -> None:
    """A ring has 2 (ranks - 1), one after the other."""
    powers = [2**number for number in range(rounds)]
    found = in_a_fork(messages_of, ranks)
    assert found == {"vote": powers, "barrier": powers, "gather": powers, "objects": 2 * powers}


def patient_exchanges(beside_nccl: bool) -> list[Any]:
    """Exchanges for which rank 1 comes later than the limit of collectives."""
    usual, real = collective_limit(), distributed.host_group
    arguments = TrainingArguments("unused", use_cpu=True)
    set_collective_limit(timedelta(seconds=1))
    if beside_nccl:  # without a group in host memory: before the engine is built
        distributed.host_group = lambda: None
    try:
        found: list[Any] = []
        for exchange in (
            lambda: distributed.barrier(),
            lambda: distributed.agree(torch.tensor([distributed.rank()]), patient=True),
            lambda: distributed.gather_objects(distributed.rank()),
            lambda: distributed.gather_to_main(distributed.rank()),
            lambda: distributed.broadcast_object(distributed.rank() + 5),
        ):
            if distributed.rank() == 1:
                time.sleep(1.6)
            found.append(exchange())
        with arguments.main_process_first(local=False):
            if distributed.rank() == 0:
                time.sleep(1.6)
        return found
    finally:
        distributed.host_group = real
        set_collective_limit(usual)


@pytest.mark.cases(1)
@pytest.mark.parametrize("beside_nccl", [False, True])
def test_exchanges_after_work_on_a_disk_have_no_time_limit(beside_nccl: bool) -> None:
    first, second = pool(2).run(patient_exchanges, beside_nccl)
    assert first == [None, [1], [0, 1], [0, 1], 5]
    assert second == [None, [1], [0, 1], None, 5]

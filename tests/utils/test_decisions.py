"""Decisions of all ranks: the largest vote, in the same order on every rank."""

from __future__ import annotations

import time
from typing import Any

import torch

from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
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
        "sizes": [distributed.group_size(), distributed.group_size(groups.tp), distributed.world_size()],
        "sum": summed(rank, groups.tp),
        "late": late(rank),
    }


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
        assert found["sizes"] == [4, 2, 4]
        assert found["late"] == [RANKS - 1]
        assert found["sum"] == [1111, 11 if rank < 2 else 1100]


def test_one_process_gets_its_own_decision() -> None:
    assert distributed.agree(torch.tensor([3, -1])) == [3, -1]
    assert distributed.Agreement(torch.tensor([3])).result() == [3]
    assert distributed.alike("a") and distributed.gather_objects(1) == distributed.gather_to_main(1) == [1]
    assert distributed.broadcast_object("a") == distributed.broadcast_from_main("a") == "a"
    assert distributed.group_size() == 1 and distributed.all_reduce_sum(torch.tensor(1)) is None

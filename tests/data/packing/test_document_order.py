"""The order of documents in a row balances the work of context-parallel ranks; counted in the blocks they compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_trainer.data.packing.batch import PackedFormat, PackingCollator, balanced_order, busiest_rank
from ds_trainer.data.packing.datasets import Piece
from ds_trainer.parallel.attention_blocks import AttentionBlocks
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from tests.support.attention import plan_of


def documents(row: int, mean: float, seed: int) -> list[int]:
    """Lengths of documents that fill most of a row."""
    draws, lengths = np.random.default_rng(seed), []
    while sum(lengths) < row:
        lengths.append(max(8, int(draws.exponential(mean))))
    return lengths[:-1] or [row]


def scores(lengths: list[int], row: int, cp: int) -> list[int]:
    """Pairs of tokens that each rank computes, in blocks that are divided until little is masked."""
    room = row - sum(lengths)
    numbers = torch.arange(len(lengths) + 1).repeat_interleave(torch.tensor([*lengths, room]))[None]
    plan = plan_of(ParallelLayout(cp, cp=cp), row, numbers)
    return [AttentionBlocks(plan, rank, True, None, 32 * 32).scores for rank in range(cp)]


@pytest.mark.cases(3)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("mean", [0.25, 1.0])
def test_the_busiest_rank_has_less_to_do(cp: int, mean: float) -> None:
    row, given, ordered = 2 * cp * 512, [], []
    for seed in range(6):
        lengths = documents(row, mean * 512, seed)
        order = balanced_order(lengths, row, cp)
        assert sorted(order) == list(range(len(lengths)))
        for found, kept in ((lengths, given), ([lengths[index] for index in order], ordered)):
            work = scores(found, row, cp)
            kept.append(cp * max(work) / sum(work))
    assert np.mean(ordered) < 1.25 and max(ordered) < 1.6, ordered
    assert np.mean(ordered) - 1 < 0.7 * (np.mean(given) - 1), (given, ordered)


def test_an_order_is_never_worse_than_that_of_the_row() -> None:
    for seed in range(8):
        lengths = np.asarray(documents(4096, 1500, seed))
        order = balanced_order(lengths.tolist(), 4096, 4)
        assert busiest_rank(lengths[order], 4096, 4) <= busiest_rank(lengths, 4096, 4)


def test_the_estimate_counts_pairs() -> None:
    for causal in (True, False):
        lengths, row, cp = [5, 1, 9, 3], 24, 3
        numbers = torch.arange(5).repeat_interleave(torch.tensor([*lengths, 6]))
        visible = (numbers[:, None] == numbers) & (torch.ones(24, 24).tril().bool() | torch.tensor(not causal))
        plan = SequencePlan(ParallelLayout(cp, cp=cp), row)
        work = [int(visible[plan.context_positions(rank)].sum()) for rank in range(cp)]
        assert busiest_rank(np.asarray(lengths), row, cp, causal) == max(work)


def test_one_rank_keeps_the_order_of_the_row() -> None:
    assert balanced_order([3, 900, 5], 1024, 1) == [0, 1, 2]
    row = [Piece({"input_ids": torch.full((n,), n)}, 0, n, n) for n in (700, 30, 270)]

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"input_ids": samples[0]["input_ids"][None], "labels": samples[0]["input_ids"][None].clone()}

    (plain,), (ordered,) = (PackingCollator(collate, 1024, PackedFormat(), cp=cp)([row])["input_ids"] for cp in (1, 2))
    assert plain.tolist() != ordered.tolist()
    assert sorted(plain.tolist()) == sorted(ordered.tolist())
    assert plain[:700].eq(700).all()

"""Documents of packed sequences, numbered before the sequence is sharded; and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from tests.data.test_sequence_sharding import PAD, sharder_for
from tests.support.attention import tokens_of

LAYOUT = ParallelLayout(2, cp=2)


def batch(length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(10, 10 + length)[None]
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def documents(values: dict[str, Any]) -> list[int] | None:
    _, plan = sharder_for(LAYOUT).shard(values, 0, 0)
    return None if plan.documents is None else tokens_of(plan, 1)[0][0].tolist()


def documents_of_shards(values: Any, length: int) -> dict[str, list[int]]:
    """All tokens of the padded sequence, in order."""
    found: dict[str, list[int]] = {}
    for cp_rank in range(2):
        shard, plan = sharder_for(LAYOUT).shard(values, cp_rank, 0)
        for key, value in shard.items():
            row = found.setdefault(key, [0] * length)
            for position, entry in zip(plan.positions(cp_rank, 0).tolist(), value[0].tolist(), strict=True):
                row[position] = entry
    return found


@pytest.mark.parametrize(
    ("positions", "numbers"),
    [
        ([0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1]),
        ([0, 1, 2, 3, 7, 8, 9, 10], [0, 0, 0, 0, 1, 1, 1, 1]),  # a jump forward: a part of another document
        ([0, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 2, 2, 2, 2, 2]),
        ([3, 4, 5, 6, 7, 8, 9, 10], None),
    ],
)
def test_a_position_that_does_not_continue_starts_a_document(positions: list[int], numbers: list[int] | None) -> None:
    assert documents(batch(8, position_ids=torch.tensor([positions]))) == numbers


def test_with_an_attention_mask_positions_describe_padding() -> None:
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    assert documents(batch(8, position_ids=positions, attention_mask=mask)) == [0] * 8


def test_boundaries_of_a_flash_kernel_become_documents() -> None:
    values = batch(8, cu_seq_lens_q=torch.tensor([0, 3, 8], dtype=torch.int32), max_length_q=5)
    assert documents(values) == [0, 0, 0, 1, 1, 1, 1, 1]
    assert not {"cu_seq_lens_q", "max_length_q"} & set(sharder_for(LAYOUT).shard(values, 0, 0)[0])


def test_padding_is_a_document_of_its_own() -> None:
    found = documents_of_shards(batch(6), 8)
    assert found["input_ids"] == [10, 11, 12, 13, 14, 15, PAD, PAD]
    assert found["labels"] == [11, 12, 13, 14, 15, IGNORED, IGNORED, IGNORED]
    assert found["attention_mask"] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert found["position_ids"] == [0, 1, 2, 3, 4, 5, 5, 5]
    _, plan = sharder_for(LAYOUT).shard(batch(6), 0, 0)
    assert tokens_of(plan, 1)[1][0].tolist() == [True] * 6 + [False] * 2


def test_a_sequence_that_fits_gets_no_mask() -> None:
    shard, plan = sharder_for(LAYOUT).shard(batch(8), 0, 0)
    assert "attention_mask" not in shard and plan.documents is None
    full = torch.ones(1, 8, dtype=torch.int64)
    assert sharder_for(LAYOUT).shard(batch(8, attention_mask=full), 0, 0)[1].documents is None


def test_a_dummy_batch_stays_one_when_it_is_sharded() -> None:
    assert isinstance(sharder_for(LAYOUT).shard(DummyBatch(batch(8)), 0, 0)[0], DummyBatch)
    assert not isinstance(sharder_for(LAYOUT).shard(batch(8), 0, 0)[0], DummyBatch)


def test_a_plan_needs_equal_chunks() -> None:
    SequencePlan(LAYOUT, 8)
    with pytest.raises(ValueError, match="a length of 7 is not a multiple of 4"):
        SequencePlan(LAYOUT, 7)

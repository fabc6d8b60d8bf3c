"""The beginning of a batch, with which long rows are checked before the first step: a batch of a few of its tokens."""

from __future__ import annotations

import pytest
import torch

from tests.data.test_sequence_sharding import layout_of, sharder_for
from tests.support.attention import tokens_of


def test_a_beginning_is_a_batch_of_the_first_tokens() -> None:
    sharder, length = sharder_for(layout_of(2, 1)), 40
    tokens = torch.arange(2 * length).view(2, length)
    batch = {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones(2, length),
        "pixels": torch.ones(3),
        "x": None,
    }
    few = sharder.beginning(batch, 16)
    assert list(few) == list(batch) and few["x"] is None and few["pixels"] is batch["pixels"]
    for key in ("input_ids", "labels", "attention_mask"):
        assert torch.equal(few[key], batch[key][:, :16])
        assert few[key].untyped_storage().nbytes() == few[key].nbytes  # no view of the whole
    assert sharder.beginning(batch, length) == batch


def test_a_beginning_has_targets() -> None:
    sharder, tokens = sharder_for(layout_of(2, 1)), torch.arange(80).view(2, 40)
    labels = torch.full_like(tokens, -100)
    batch = {"input_ids": tokens, "labels": labels}
    assert sharder.beginning(batch, 16)["input_ids"][0].tolist() == list(range(16))  # there are none
    labels[1, 20:] = 1
    assert sharder.beginning(batch, 16)["input_ids"][0].tolist() == list(range(19, 35))
    labels[0, 38] = 1
    labels[1] = -100
    assert sharder.beginning(batch, 16)["input_ids"][0].tolist() == list(range(24, 40))
    labels[1, 15] = 1
    assert sharder.beginning(batch, 16)["input_ids"][0].tolist() == list(range(16))


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
@pytest.mark.parametrize("late", [False, True])
def test_the_documents_of_a_beginning_are_those_of_its_tokens(options: dict[str, bool], late: bool) -> None:
    from transformers import DataCollatorWithFlattening

    rows = [{"input_ids": list(range(10, 10 + n))} for n in (3, 5, 4, 7, 9)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(rows)
    if late:
        batch["labels"][:, :14] = -100  # the second token of the fourth document is the first target
    sharder, start = sharder_for(layout_of(2, 1)), 13 if late else 0
    few = sharder.beginning(batch, 12)
    assert list(few) == list(batch)
    _, plan = sharder.shard(few, 0, 0)
    _, whole = sharder.shard(batch, 0, 0)
    found, wanted = tokens_of(plan, 1)[0][0], tokens_of(whole, 1)[0][0, start : start + 12]
    assert found.unique().numel() > 1
    assert torch.equal(found - found[0], wanted - wanted[0])

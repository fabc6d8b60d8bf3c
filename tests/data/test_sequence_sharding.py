"""``SequenceSharder``: no token is lost or duplicated, every target is at its position, and invalid batches raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ds_trainer import ConfigError
from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.data.collators import default_data_collator
from ds_trainer.data.sequence_sharding import SequenceSharder, unshard
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.training.loop.loss_rule import ItemCounter
from tests.support.attention import tokens_of
from tests.support.models import tiny_llama

LLAMA = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels")
PAD = 7

Parts = list[dict[str, Any]]


def sharder_for(layout: ParallelLayout, **more: Any) -> SequenceSharder:
    values: dict[str, Any] = {
        "shifts_labels": True,
        "label_names": ["labels"],
        "accepts": LLAMA,
        "accepts_any": True,
        "pad_token_id": PAD,
    }
    return SequenceSharder(layout, **{**values, **more})


def layout_of(cp: int, sp: int) -> ParallelLayout:
    return ParallelLayout(cp * sp, cp=cp, sp=sp)


def all_shards(sharder: SequenceSharder, batch: Any, **more: Any) -> tuple[Parts, SequencePlan]:
    layout = sharder.layout
    found = [sharder.shard(batch, cp, sp, **more) for cp in range(layout.cp) for sp in range(layout.sp)]
    return [shard for shard, _ in found], found[0][1]


def unsharded(sharder: SequenceSharder, batch: Any, key: str) -> torch.Tensor:
    shards, plan = all_shards(sharder, batch)
    return unshard([shard[key] for shard in shards], plan, sharder.length(batch))


@st.composite
def batches(draw: Any) -> dict[str, torch.Tensor]:
    """Padded on either side, packed, or plain batches, any length, with masked targets inside."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 37))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    tokens = torch.randint(10, 60, (rows, length), generator=generator)
    labels = tokens.masked_fill(torch.rand(rows, length, generator=generator) < 0.2, -100)
    batch = {"input_ids": tokens, "labels": labels}
    kind = draw(st.sampled_from(["plain", "right", "left", "packed"]))
    if kind in ("right", "left"):
        used = torch.randint(1, length + 1, (rows, 1), generator=generator)
        mask = (torch.arange(length) < used).long()
        batch["attention_mask"] = mask if kind == "right" else mask.flip(1)
        batch["labels"] = labels.masked_fill(batch["attention_mask"] == 0, -100)
    if kind == "packed":
        begins = torch.rand(rows, length, generator=generator) < 0.3
        begins[:, 0] = True
        positions = torch.arange(length).expand(rows, -1)
        batch["position_ids"] = positions - torch.where(begins, positions, 0).cummax(1).values
    if draw(st.booleans()):
        batch["weights"] = torch.rand(rows, length, 2, generator=generator)  # some own input along the sequence
    return batch


sizes = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))


@settings(max_examples=150, deadline=None)
@given(batch=batches(), size=sizes)
def test_unsharding_restores_the_batch(batch: dict[str, torch.Tensor], size: tuple[int, int]) -> None:
    layout = layout_of(*size)
    shards, plan = all_shards(sharder_for(layout), batch)
    rows, length = batch["input_ids"].shape
    assert plan.length % layout.length_multiple == 0 and 0 <= plan.length - length < layout.length_multiple
    for shard in shards:
        assert shard["input_ids"].shape == (rows, plan.length // (layout.cp * layout.sp))
        assert "batch" not in shard and set(batch) <= set(shard)
    for key in set(batch) - {"labels"}:
        assert torch.equal(unsharded(sharder_for(layout), batch, key), batch[key]), key
    positions = unsharded(sharder_for(layout), batch, "position_ids")
    default = torch.arange(length).expand(rows, -1)
    assert torch.equal(positions, batch.get("position_ids", default))


@settings(max_examples=150, deadline=None)
@given(batch=batches(), size=sizes)
def test_every_target_counts_once(batch: dict[str, torch.Tensor], size: tuple[int, int]) -> None:
    layout = layout_of(*size)
    shards, plan = all_shards(sharder_for(layout), batch)
    count = ItemCounter(["labels"], shifted=True)
    assert sum(int(count(shard)) for shard in shards) == int(count(batch))
    wanted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    assert torch.equal(unsharded(sharder_for(layout), batch, "shift_labels"), wanted)
    for cp in range(layout.cp):
        for sp in range(layout.sp):
            shard = shards[cp * layout.sp + sp]
            assert torch.equal(shard["labels"], shard["shift_labels"])
            for column, index in enumerate(plan.positions(cp, sp).tolist()):
                expected = wanted[:, index] if index < wanted.shape[1] else torch.full_like(wanted[:, 0], -100)
                assert torch.equal(shard["shift_labels"][:, column], expected)


def test_control_shifting_after_sharding_loses_targets() -> None:
    """Negative control."""
    batch = {"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}
    # What counting would give if every rank shifted its own part.
    sharder = sharder_for(layout_of(2, 2))
    unshifted = SequenceSharder(
        sharder.layout, shifts_labels=False, label_names=["labels"], accepts=LLAMA, accepts_any=True
    )
    assert sum(int(ItemCounter(["labels"], shifted=True)(shard)) for shard in all_shards(unshifted, batch)[0]) < 15


@settings(max_examples=100, deadline=None)
@given(batch=batches(), size=sizes)
def test_documents_are_those_of_transformers(batch: dict[str, torch.Tensor], size: tuple[int, int]) -> None:
    from transformers.masking_utils import find_packed_sequence_indices

    _, plan = all_shards(sharder_for(layout_of(*size)), batch)
    rows, length = batch["input_ids"].shape
    documents, valid = tokens_of(plan, rows)
    assert documents.shape == valid.shape == (rows, plan.length)
    if "position_ids" in batch:
        reference = find_packed_sequence_indices(batch["position_ids"])
        reference = torch.zeros(rows, length, dtype=torch.int64) if reference is None else reference
        assert torch.equal(documents[:, :length], reference)
    else:
        assert not documents.any()
    wanted = batch.get("attention_mask", torch.ones(rows, length)).bool()
    assert torch.equal(valid[:, :length], wanted)
    assert not valid[:, length:].any()


def test_padding_values_of_a_sequence() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "labels": torch.tensor([[1, 2, 3]]),
        "token_type_ids": torch.ones(1, 3, dtype=torch.int64),
        "extra": torch.ones(1, 3, 2),
        "flags": torch.tensor([[True, True, True]]),
    }
    (shard,), plan = all_shards(sharder_for(ParallelLayout(1)), batch)
    assert plan.length == 4
    assert shard["input_ids"].tolist() == [[1, 2, 3, PAD]]
    assert shard["labels"].tolist() == [[2, 3, -100, -100]]
    assert shard["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert shard["position_ids"].tolist() == [[0, 1, 2, 2]]  # inside of a table of 3 positions
    assert shard["token_type_ids"].tolist() == [[1, 1, 1, 0]]
    assert shard["flags"].tolist() == [[True, True, True, False]]
    assert shard["extra"].sum() == 6
    (shard,), _ = all_shards(sharder_for(ParallelLayout(1)), batch | {"position_ids": torch.tensor([[0, 1, 2]])})
    assert shard["position_ids"].tolist() == [[0, 1, 2, 2]]  # those that a batch brings too: 0 would begin a document
    without = sharder_for(
        ParallelLayout(1), accepts=("input_ids", "position_ids", "labels"), accepts_any=False, shifts_labels=False
    )
    assert "attention_mask" not in without.shard(batch, 0, 0)[0]
    assert batch["input_ids"].shape == (1, 3) and "attention_mask" not in batch  # the batch itself is as it was


def test_with_fewer_tokens_than_ranks_some_ranks_have_only_padding() -> None:
    shards, plan = all_shards(
        sharder_for(layout_of(2, 2)), {"input_ids": torch.tensor([[5]]), "labels": torch.tensor([[5]])}
    )
    assert plan.length == 8
    assert [shard["input_ids"].tolist() for shard in shards] == [[[5, PAD]], [[PAD, PAD]], [[PAD, PAD]], [[PAD, PAD]]]
    assert sum(int(shard["shift_labels"].ne(-100).sum()) for shard in shards) == 0


def test_values_per_sample_are_not_sharded() -> None:
    batch = {
        "input_ids": torch.arange(16).view(2, 8),
        "weight": torch.tensor([0.5, 2.0]),
        "image": torch.zeros(2, 3, 5, 5),
        "name": ["a", "b"],
        "scale": torch.tensor(3.0),
        "nothing": None,
    }
    shards, _ = all_shards(sharder_for(layout_of(2, 1)), batch)
    for shard in shards:
        assert shard["weight"] is batch["weight"] and shard["image"] is batch["image"] and shard["name"] == ["a", "b"]
        assert shard["input_ids"].shape == (2, 4)
        assert "nothing" not in shard


def test_models_may_flatten_shards_and_prefixes_with_view() -> None:
    batch = {"input_ids": torch.arange(48).view(3, 16), "labels": torch.arange(48).view(3, 16)}
    sharder = sharder_for(layout_of(1, 2), shifts_labels=False)
    shards, _ = all_shards(sharder, batch)
    for part in (*shards, sharder.prefix(batch, 8)):
        assert part["labels"].view(-1).shape == (24,)


def test_a_dummy_batch_stays_one() -> None:
    batch = DummyBatch({"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]})
    shard, _ = sharder_for(layout_of(2, 1)).shard(batch, 0, 0)
    assert isinstance(shard, DummyBatch)
    assert int(ItemCounter(["labels"], shifted=True)(shard)) == 0


def test_embeddings_are_sharded_and_restored() -> None:
    batch = {"inputs_embeds": torch.randn(2, 10, 10), "labels": torch.arange(20).view(2, 10)}  # width = length
    with pytest.raises(ConfigError, match="relates tokens to tokens"):
        all_shards(sharder_for(layout_of(2, 2)), {**batch, "bias": torch.zeros(2, 10, 10)})
    assert torch.equal(unsharded(sharder_for(layout_of(2, 2)), batch, "inputs_embeds"), batch["inputs_embeds"])


def test_a_custom_model_may_use_other_names() -> None:
    sharder = sharder_for(
        layout_of(2, 1), accepts=("tokens", "position_ids", "target"), accepts_any=False, shifts_labels=False
    )
    sharder.label_names = ("target",)
    batch = {"target": torch.arange(8)[None], "tokens": torch.arange(8)[None]}
    shards, plan = all_shards(sharder, batch)
    assert torch.equal(unshard([shard["target"] for shard in shards], plan, 8), batch["target"])  # not shifted
    assert "shift_labels" not in shards[0]
    with pytest.raises(ConfigError, match="no sequence to shard"):
        all_shards(sharder, {"tokens": torch.rand(2, 6), "target": torch.rand(2)})


# -- packed batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
def test_batches_of_the_flattening_collator_are_sharded(options: dict[str, bool]) -> None:
    from transformers import DataCollatorWithFlattening

    rows = [{"input_ids": list(range(10, 10 + n))} for n in (3, 5, 2)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(rows)
    shards, plan = all_shards(sharder_for(layout_of(2, 1)), batch)
    found = tokens_of(plan, 1)[0][0].tolist()
    assert found == [0] * 3 + [1] * 5 + [2] * 2 + [2] * 2  # padding belongs to the last document
    assert not set(shards[0]) & {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    assert torch.equal(unshard([shard["position_ids"] for shard in shards], plan, 10), batch["position_ids"])


def test_documents_from_boundaries_without_positions() -> None:
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    batch = {"input_ids": torch.arange(8)[None], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5}
    (shard, _), plan = all_shards(sharder_for(layout_of(2, 1)), batch)
    assert tokens_of(plan, 1)[0][0].tolist() == [0] * 3 + [1] * 5
    assert shard["position_ids"].tolist() == [[0, 1, 6, 7]]  # first and last quarter


def test_positions_are_ignored_with_an_attention_mask() -> None:
    """As in transformers: a batch with an attention_mask is not treated as packed."""
    batch = {
        "input_ids": torch.arange(8)[None],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]),
        "attention_mask": torch.ones(1, 8, dtype=torch.int64),
    }
    _, plan = all_shards(sharder_for(layout_of(1, 2)), batch)
    assert plan.documents is None


def test_shifted_labels_are_used_unchanged() -> None:
    shifted = torch.tensor([[2, 3, 4, -100, 6, 7, 8, -100]])
    batch = {"input_ids": torch.arange(1, 9)[None], "shift_labels": shifted}
    shards, plan = all_shards(sharder_for(layout_of(2, 1)), batch, needs_labels=True)
    assert torch.equal(unshard([shard["shift_labels"] for shard in shards], plan, 8), shifted)
    assert torch.equal(shards[0]["labels"], shards[0]["shift_labels"])


# -- the loss of transformers -----------------------------------------------------------------------------------------


def test_the_losses_of_the_shards_add_up_to_the_full_loss() -> None:
    """By the loss function that the model calls, on logits computed once: 37 tokens, 2 x 2 ranks."""
    model = tiny_llama().eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 61, (2, 37), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(2, 37, generator=generator) < 0.3, -100)}
    sharder = sharder_for(layout_of(2, 2))
    items = ItemCounter(["labels"], shifted=True)(batch)
    with torch.no_grad():
        full = model(**batch, num_items_in_batch=items)
        shards, plan = all_shards(sharder, batch)
        filled = F.pad(full.logits, (0, 0, 0, plan.length - 37))
        losses = []
        for index, shard in enumerate(shards):
            logits = filled[:, plan.positions(index // 2, index % 2)]
            labels = {key: shard[key] for key in ("labels", "shift_labels")}
            losses.append(model.loss_function(logits, vocab_size=61, num_items_in_batch=items, **labels))
            del labels["shift_labels"]
        assert torch.allclose(torch.stack(losses).sum(), full.loss, rtol=1e-6)
        unshifted = model.loss_function(
            filled[:, plan.positions(0, 0)], shards[0]["labels"], 61, num_items_in_batch=items
        )
    assert not torch.allclose(unshifted, losses[0], rtol=1e-3)  # without shift_labels the model would shift once more


# -- errors ------------------------------------------------------------------------------------------------------------

TOKENS = torch.arange(16).view(2, 8)

INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "a class for each sample": ({"input_ids": TOKENS, "labels": torch.tensor([0, 1])}, "Only one class per token"),
    "labels of another length": ({"input_ids": TOKENS, "labels": torch.zeros(2, 5, dtype=torch.int64)}, "'labels'"),
    "float labels": ({"input_ids": TOKENS, "labels": torch.rand(2, 8)}, "floats of the shape"),
    "no labels": ({"input_ids": TOKENS}, "has no labels"),
    "a mask of four dimensions": (
        {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": torch.ones(2, 1, 8, 8)},
        "relates tokens to tokens",
    ),
    "a mask of three dimensions": (
        {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": torch.ones(2, 8, 8)},
        "relates tokens to tokens",
    ),
    "a mask of another length": (
        {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": torch.ones(2, 9)},
        "unclear whether to shard",
    ),
    "positions in three dimensions": (
        {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.zeros(3, 2, 8, dtype=torch.int64)},
        r"'position_ids' of a batch has the shape \[3, 2, 8\]",
    ),
    "one number per position, without rows": (
        {"input_ids": TOKENS, "labels": TOKENS, "order": torch.arange(8)},
        r"'order' of a batch has the shape \[8\]",
    ),
    "nested": ({"input_ids": TOKENS, "labels": TOKENS, "more": {"x": TOKENS}}, "under separate names"),
    "several choices": ({"input_ids": torch.zeros(2, 4, 8, dtype=torch.int64), "labels": TOKENS}, "cannot be sharded"),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "at least one token"),
    "a list": ([{"prompt": "a"}], "A batch is a list, which has no sequence to shard: the data collator"),
    "inputs under other names": ({"chosen_input_ids": TOKENS, "labels": TOKENS}, "has no input_ids or inputs_embeds"),
    "bounds of several rows": ({"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, 8])}, "has 2 rows"),
}


@pytest.mark.parametrize("name", INVALID)
def test_batches_that_cannot_be_sharded_raise(name: str) -> None:
    batch, message = INVALID[name]
    with pytest.raises(ConfigError, match=message):
        sharder_for(layout_of(2, 1)).shard(batch, 0, 0, needs_labels=True)


def test_batches_that_are_no_mappings_cannot_be_sharded() -> None:
    samples: Any = [{"prompt": "a"}]
    with pytest.raises(ConfigError, match="A batch is a list, which has no sequence to shard"):
        sharder_for(layout_of(1, 2)).prefix(samples, 8)


def test_two_kinds_of_labels_cannot_both_be_shifted() -> None:
    sharder = sharder_for(layout_of(2, 1), label_names=["labels", "next_labels"])
    with pytest.raises(ConfigError, match="labels and next_labels"):
        sharder.shard({"input_ids": TOKENS, "labels": TOKENS, "next_labels": TOKENS}, 0, 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"accepts": ("input_ids", "labels", "shift_labels")}, "takes no position_ids"),
        ({"accepts": ("input_ids", "labels", "position_ids"), "accepts_any": False}, "shift_labels"),
    ],
)
def test_models_without_the_required_arguments(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharder_for(layout_of(2, 1), **more)


def test_a_model_with_custom_positions_needs_them_in_the_batch() -> None:
    sharder = sharder_for(layout_of(2, 1), custom_positions=True)
    with pytest.raises(ConfigError, match="position_ids"):
        sharder.shard({"input_ids": TOKENS}, 0, 0)
    given_positions = {"input_ids": TOKENS, "position_ids": torch.arange(2, 10).expand(2, -1)}
    assert sharder.shard(given_positions, 0, 0)[0]["position_ids"].tolist()[0] == [2, 3, 8, 9]


def test_batches_of_any_mapping_type_are_sharded() -> None:
    collate: Callable[[Any], Any] = default_data_collator
    rows = [{"input_ids": list(range(6)), "labels": list(range(6))} for _ in range(2)]
    shard, _ = sharder_for(layout_of(1, 2)).shard(collate(rows), 0, 1)
    assert shard["input_ids"].tolist() == [[4, 5, PAD, PAD]] * 2

"""The cut of a batch: nothing lost, nothing twice, every target where it belongs, and refusals in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ds_trainer import ConfigError
from ds_trainer.data.collators import default_data_collator
from ds_trainer.data.loader import FillerBatch
from ds_trainer.data.sequence_cut import SequenceCut, join
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from ds_trainer.training.loss import ItemCounter
from tests.support.models import tiny_llama

LLAMA = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels")
PAD = 7

Parts = list[dict[str, Any]]


def cutter(layout: ParallelLayout, **more: Any) -> SequenceCut:
    values: dict[str, Any] = {
        "shifts_labels": True,
        "label_names": ["labels"],
        "takes": LLAMA,
        "takes_any": True,
        "pad_token_id": PAD,
    }
    return SequenceCut(layout, **{**values, **more})


def layout_of(cp: int, sp: int) -> ParallelLayout:
    return ParallelLayout(cp * sp, cp=cp, sp=sp)


def all_parts(cut: SequenceCut, batch: Any, **more: Any) -> tuple[Parts, SequencePlan]:
    layout = cut.layout
    found = [cut.cut(batch, cp, sp, **more) for cp in range(layout.cp) for sp in range(layout.sp)]
    return [part for part, _ in found], found[0][1]


def rejoined(cut: SequenceCut, batch: Any, key: str) -> torch.Tensor:
    parts, plan = all_parts(cut, batch)
    return join([part[key] for part in parts], plan, cut.length(batch))


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
        places = torch.arange(length).expand(rows, -1)
        batch["position_ids"] = places - torch.where(begins, places, 0).cummax(1).values
    if draw(st.booleans()):
        batch["weights"] = torch.rand(rows, length, 2, generator=generator)  # some own input along the sequence
    return batch


sizes = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))


@settings(max_examples=150, deadline=None)
@given(batch=batches(), size=sizes)
def test_joining_the_parts_gives_the_batch_back(batch: dict[str, torch.Tensor], size: tuple[int, int]) -> None:
    layout = layout_of(*size)
    parts, plan = all_parts(cutter(layout), batch)
    rows, length = batch["input_ids"].shape
    assert plan.length % layout.length_multiple == 0 and 0 <= plan.length - length < layout.length_multiple
    for part in parts:
        assert part["input_ids"].shape == (rows, plan.length // (layout.cp * layout.sp))
        assert "batch" not in part and set(batch) <= set(part)
    for key in set(batch) - {"labels"}:
        assert torch.equal(rejoined(cutter(layout), batch, key), batch[key]), key
    positions = rejoined(cutter(layout), batch, "position_ids")
    default = torch.arange(length).expand(rows, -1)
    assert torch.equal(positions, batch.get("position_ids", default))


@settings(max_examples=150, deadline=None)
@given(batch=batches(), size=sizes)
def test_every_target_counts_once(batch: dict[str, torch.Tensor], size: tuple[int, int]) -> None:
    layout = layout_of(*size)
    parts, plan = all_parts(cutter(layout), batch)
    count = ItemCounter(["labels"], shifted=True)
    assert sum(int(count(part)) for part in parts) == int(count(batch))
    wanted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    assert torch.equal(rejoined(cutter(layout), batch, "shift_labels"), wanted)
    for cp in range(layout.cp):
        for sp in range(layout.sp):
            part = parts[cp * layout.sp + sp]
            assert torch.equal(part["labels"], part["shift_labels"])
            for column, place in enumerate(plan.positions(cp, sp).tolist()):
                expected = wanted[:, place] if place < wanted.shape[1] else torch.full_like(wanted[:, 0], -100)
                assert torch.equal(part["shift_labels"][:, column], expected)


def loses_border_targets(cut: SequenceCut, batch: dict[str, torch.Tensor]) -> int:
    """What counting would give if every rank shifted its own part."""
    unshifted = SequenceCut(cut.layout, shifts_labels=False, label_names=["labels"], takes=LLAMA, takes_any=True)
    return sum(int(ItemCounter(["labels"], shifted=True)(part)) for part in all_parts(unshifted, batch)[0])


def test_shifting_after_the_cut_loses_targets() -> None:
    """Negative control."""
    batch = {"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}
    assert loses_border_targets(cutter(layout_of(2, 2)), batch) < 15


@settings(max_examples=100, deadline=None)
@given(batch=batches(), size=sizes)
def test_what_may_be_seen_is_what_transformers_lets_see(batch: dict[str, torch.Tensor], size: tuple[int, int]) -> None:
    from transformers.masking_utils import find_packed_sequence_indices

    _, plan = all_parts(cutter(layout_of(*size)), batch)
    rows, length = batch["input_ids"].shape
    documents = plan.documents if plan.documents is not None else torch.zeros(rows, plan.length, dtype=torch.int64)
    valid = plan.valid if plan.valid is not None else torch.ones(rows, plan.length, dtype=torch.bool)
    assert documents.shape == valid.shape == (rows, plan.length)
    if "position_ids" in batch:
        theirs = find_packed_sequence_indices(batch["position_ids"])
        theirs = torch.zeros(rows, length, dtype=torch.int64) if theirs is None else theirs
        assert torch.equal(documents[:, :length], theirs)
    else:
        assert not documents.any()
    wanted = batch.get("attention_mask", torch.ones(rows, length)).bool()
    assert torch.equal(valid[:, :length], wanted)
    assert not valid[:, length:].any()


def test_what_a_sequence_is_filled_up_with() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "labels": torch.tensor([[1, 2, 3]]),
        "token_type_ids": torch.ones(1, 3, dtype=torch.int64),
        "extra": torch.ones(1, 3, 2),
        "flags": torch.tensor([[True, True, True]]),
    }
    (part,), plan = all_parts(cutter(ParallelLayout(1)), batch)
    assert plan.length == 4
    assert part["input_ids"].tolist() == [[1, 2, 3, PAD]]
    assert part["labels"].tolist() == [[2, 3, -100, -100]]
    assert part["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert part["position_ids"].tolist() == [[0, 1, 2, 2]]  # inside of a table of 3 positions
    assert part["token_type_ids"].tolist() == [[1, 1, 1, 0]]
    assert part["flags"].tolist() == [[True, True, True, False]]
    assert part["extra"].sum() == 6
    without = cutter(
        ParallelLayout(1), takes=("input_ids", "position_ids", "labels"), takes_any=False, shifts_labels=False
    )
    assert "attention_mask" not in without.cut(batch, 0, 0)[0]
    assert batch["input_ids"].shape == (1, 3) and "attention_mask" not in batch  # the batch itself is as it was


def test_a_sequence_shorter_than_the_ranks_leaves_some_with_padding_only() -> None:
    parts, plan = all_parts(cutter(layout_of(2, 2)), {"input_ids": torch.tensor([[5]]), "labels": torch.tensor([[5]])})
    assert plan.length == 8
    assert [part["input_ids"].tolist() for part in parts] == [[[5, PAD]], [[PAD, PAD]], [[PAD, PAD]], [[PAD, PAD]]]
    assert sum(int(part["shift_labels"].ne(-100).sum()) for part in parts) == 0


def test_what_belongs_to_samples_stays_whole() -> None:
    batch = {
        "input_ids": torch.arange(16).view(2, 8),
        "weight": torch.tensor([0.5, 2.0]),
        "image": torch.zeros(2, 3, 5, 5),
        "name": ["a", "b"],
        "scale": torch.tensor(3.0),
        "nothing": None,
    }
    parts, _ = all_parts(cutter(layout_of(2, 1)), batch)
    for part in parts:
        assert part["weight"] is batch["weight"] and part["image"] is batch["image"] and part["name"] == ["a", "b"]
        assert part["input_ids"].shape == (2, 4)
        assert "nothing" not in part


def test_a_filler_stays_one() -> None:
    batch = FillerBatch({"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]})
    part, _ = cutter(layout_of(2, 1)).cut(batch, 0, 0)
    assert isinstance(part, FillerBatch)
    assert int(ItemCounter(["labels"], shifted=True)(part)) == 0


def test_embeddings_are_cut_and_come_back() -> None:
    batch = {"inputs_embeds": torch.randn(2, 10, 10), "labels": torch.arange(20).view(2, 10)}  # width = length
    with pytest.raises(ConfigError, match="relates tokens to tokens"):
        all_parts(cutter(layout_of(2, 2)), {**batch, "bias": torch.zeros(2, 10, 10)})
    assert torch.equal(rejoined(cutter(layout_of(2, 2)), batch, "inputs_embeds"), batch["inputs_embeds"])


def test_a_model_of_ones_own_with_names_of_its_own() -> None:
    cut = cutter(layout_of(2, 1), takes=("tokens", "position_ids", "target"), takes_any=False, shifts_labels=False)
    cut.label_names = ("target",)
    batch = {"target": torch.arange(8)[None], "tokens": torch.arange(8)[None]}
    parts, plan = all_parts(cut, batch)
    assert torch.equal(join([part["target"] for part in parts], plan, 8), batch["target"])  # not shifted
    assert "shift_labels" not in parts[0]


# -- packed batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
def test_batches_of_the_flattening_collator(options: dict[str, bool]) -> None:
    from transformers import DataCollatorWithFlattening

    rows = [{"input_ids": list(range(10, 10 + n))} for n in (3, 5, 2)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(rows)
    parts, plan = all_parts(cutter(layout_of(2, 1)), batch)
    assert plan.documents is not None
    assert plan.documents[0].tolist() == [0] * 3 + [1] * 5 + [2] * 2 + [2] * 2  # as far as it was filled up
    assert not set(parts[0]) & {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
    assert torch.equal(join([part["position_ids"] for part in parts], plan, 10), batch["position_ids"])


def test_documents_without_positions_that_begin_anew() -> None:
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    batch = {"input_ids": torch.arange(8)[None], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5}
    (part, _), plan = all_parts(cutter(layout_of(2, 1)), batch)
    assert plan.documents is not None and plan.documents[0].tolist() == [0] * 3 + [1] * 5
    assert part["position_ids"].tolist() == [[0, 1, 6, 7]]  # first and last quarter


def test_positions_tell_nothing_beside_an_attention_mask() -> None:
    """As in transformers: whoever masks by hand is not taken to have packed."""
    batch = {
        "input_ids": torch.arange(8)[None],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]),
        "attention_mask": torch.ones(1, 8, dtype=torch.int64),
    }
    _, plan = all_parts(cutter(layout_of(1, 2)), batch)
    assert plan.documents is None and plan.valid is None


def test_labels_that_are_shifted_already_are_taken_as_they_are() -> None:
    shifted = torch.tensor([[2, 3, 4, -100, 6, 7, 8, -100]])
    batch = {"input_ids": torch.arange(1, 9)[None], "shift_labels": shifted}
    parts, plan = all_parts(cutter(layout_of(2, 1)), batch, needs_labels=True)
    assert torch.equal(join([part["shift_labels"] for part in parts], plan, 8), shifted)
    assert torch.equal(parts[0]["labels"], parts[0]["shift_labels"])


# -- the loss of transformers -----------------------------------------------------------------------------------------


def test_the_loss_of_the_parts_is_that_of_the_whole() -> None:
    """By the loss function that the model calls, on logits computed once: 37 tokens, 2 x 2 ranks."""
    model = tiny_llama().eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 61, (2, 37), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(2, 37, generator=generator) < 0.3, -100)}
    cut = cutter(layout_of(2, 2))
    items = ItemCounter(["labels"], shifted=True)(batch)
    with torch.no_grad():
        whole = model(**batch, num_items_in_batch=items)
        parts, plan = all_parts(cut, batch)
        filled = F.pad(whole.logits, (0, 0, 0, plan.length - 37))
        shares = []
        for index, part in enumerate(parts):
            logits = filled[:, plan.positions(index // 2, index % 2)]
            labels = {key: part[key] for key in ("labels", "shift_labels")}
            shares.append(model.loss_function(logits, vocab_size=61, num_items_in_batch=items, **labels))
            del labels["shift_labels"]
        assert torch.allclose(torch.stack(shares).sum(), whole.loss, rtol=1e-6)
        unshifted = model.loss_function(
            filled[:, plan.positions(0, 0)], parts[0]["labels"], 61, num_items_in_batch=items
        )
    assert not torch.allclose(unshifted, shares[0], rtol=1e-3)  # without shift_labels the model would shift once more


# -- refusals ---------------------------------------------------------------------------------------------------------

TOKENS = torch.arange(16).view(2, 8)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a class for each sample": ({"input_ids": TOKENS, "labels": torch.tensor([0, 1])}, "only a class for each token"),
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
        "cannot be told",
    ),
    "positions in three dimensions": (
        {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.zeros(3, 2, 8, dtype=torch.int64)},
        r"'position_ids' of a batch has the shape \[3, 2, 8\]",
    ),
    "a number for each place, but no rows": (
        {"input_ids": TOKENS, "labels": TOKENS, "order": torch.arange(8)},
        r"'order' of a batch has the shape \[8\]",
    ),
    "nested": ({"input_ids": TOKENS, "labels": TOKENS, "more": {"x": TOKENS}}, "under names of their own"),
    "several choices": ({"input_ids": torch.zeros(2, 4, 8, dtype=torch.int64), "labels": TOKENS}, "cannot be cut"),
    "no tokens": ({"input_ids": torch.zeros(2, 0, dtype=torch.int64)}, "one token at least"),
    "no sequence": ({"x": torch.rand(2, 6), "labels": torch.rand(2)}, "no sequence to cut"),
    "bounds of several rows": ({"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, 8])}, "has 2 rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_in_words(name: str) -> None:
    batch, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        cutter(layout_of(2, 1)).cut(batch, 0, 0, needs_labels=True)


def test_two_kinds_of_labels_cannot_both_be_shifted() -> None:
    cut = cutter(layout_of(2, 1), label_names=["labels", "next_labels"])
    with pytest.raises(ConfigError, match="labels and next_labels"):
        cut.cut({"input_ids": TOKENS, "labels": TOKENS, "next_labels": TOKENS}, 0, 0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"takes": ("input_ids", "labels", "shift_labels")}, "takes no position_ids"),
        ({"takes": ("input_ids", "labels", "position_ids"), "takes_any": False}, "shift_labels"),
    ],
)
def test_models_that_cannot_be_told_what_they_need(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cutter(layout_of(2, 1), **more)


def test_a_model_that_numbers_positions_in_its_own_way_needs_them_in_the_batch() -> None:
    cut = cutter(layout_of(2, 1), own_positions=True)
    with pytest.raises(ConfigError, match="position_ids"):
        cut.cut({"input_ids": TOKENS}, 0, 0)
    given_positions = {"input_ids": TOKENS, "position_ids": torch.arange(2, 10).expand(2, -1)}
    assert cut.cut(given_positions, 0, 0)[0]["position_ids"].tolist()[0] == [2, 3, 8, 9]


def test_batches_of_any_kind_of_collator() -> None:
    collate: Callable[[Any], Any] = default_data_collator
    rows = [{"input_ids": list(range(6)), "labels": list(range(6))} for _ in range(2)]
    part, _ = cutter(layout_of(1, 2)).cut(collate(rows), 0, 1)
    assert part["input_ids"].tolist() == [[4, 5, PAD, PAD]] * 2

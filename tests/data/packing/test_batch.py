"""Batches of packed rows: positions, labels, borders, masks; what a collator of the user adds; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_trainer import ConfigError
from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.collators import default_data_collator
from ds_trainer.data.packing.batch import PackedFormat, PackingCollator, PairMask
from ds_trainer.data.packing.datasets import PackedDataset, PackedStream, Piece, StatefulPackedStream, packed_stream
from ds_trainer.data.packing.rows import packed_rows
from ds_trainer.data.packing.token_counts import token_counts
from ds_trainer.parallel.deferred_mask import DocumentMask

FORMAT = PackedFormat(pad_token_id=0)


def sample(first: int, tokens: int, **more: Any) -> dict[str, Any]:
    ids = list(range(first, first + tokens))
    return {"input_ids": ids, "labels": ids, **more}


def batch(*rows: list[dict[str, Any]], length: int = 8, form: PackedFormat = FORMAT, **more: Any) -> dict[str, Any]:
    pieces = [[Piece(s, 0, len(s["input_ids"]), None) for s in row] for row in rows]
    return PackingCollator(more.pop("collate", default_data_collator), length, form, **more)(pieces)


def test_positions_restart_and_no_sample_predicts_the_next() -> None:
    made = batch([sample(10, 3), sample(20, 4)], [sample(30, 8)])
    assert made["input_ids"].tolist() == [[10, 11, 12, 20, 21, 22, 23, 0], [*range(30, 38)]]
    assert made["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [*range(8)]]
    assert made["labels"].tolist() == [[-100, 11, 12, -100, 21, 22, 23, -100], [-100, *range(31, 38)]]
    assert "attention_mask" not in made


def test_models_that_predict_their_own_token_keep_the_first_target() -> None:
    made = batch([sample(10, 3), sample(20, 4)], form=replace(FORMAT, shifts_labels=False))
    assert made["labels"].tolist() == [[10, 11, 12, 20, 21, 22, 23, -100]]


def test_tokens_are_the_labels_of_samples_without_any() -> None:
    made = batch([{"input_ids": [5, 6, 7]}], copies_tokens=True, length=4)
    assert made["labels"].tolist() == [[-100, 6, 7, -100]]


def test_masks_borders_and_offsets_for_models_that_need_them() -> None:
    form = replace(FORMAT, pair_mask=PairMask.BOOLEAN, flash=True, numbers=True, first_position=2)
    made = batch([sample(10, 2), sample(20, 1)], [sample(30, 3)], length=4, form=form)
    assert made["position_ids"].tolist() == [[2, 3, 2, 2], [2, 3, 4, 2]]
    assert made["seq_idx"].tolist() == [[0, 0, 1, 2], [0, 0, 0, 1]]
    assert made["cu_seq_lens_q"].tolist() == [0, 2, 3, 4, 7, 8] and made["max_length_k"] == 3
    assert made["cu_seq_lens_q"].dtype == torch.int32
    wanted = torch.block_diag(torch.ones(2, 2), torch.ones(1, 1), torch.ones(1, 1)).bool()
    assert made["attention_mask"].shape == (2, 1, 4, 4) and made["attention_mask"][0, 0].equal(wanted)
    deferred = batch(
        [sample(10, 2), sample(20, 1)], [sample(30, 3)], length=4, form=replace(form, pair_mask=PairMask.DEFERRED)
    )["attention_mask"]
    assert type(deferred) is DocumentMask and deferred.made().equal(made["attention_mask"])
    added = batch([sample(10, 2)], length=4, form=replace(form, pair_mask=PairMask.ADDITIVE))["attention_mask"]
    assert added[0, 0, 0].tolist() == [0, 0, torch.finfo(torch.float32).min, torch.finfo(torch.float32).min]


def test_samples_are_found_again_in_a_batch() -> None:
    made = batch([sample(10, 3), sample(20, 4)], [sample(30, 8)])
    documents = FORMAT.documents(made)
    assert [d["input_ids"].tolist() for d in documents] == [[10, 11, 12], [20, 21, 22, 23], [*range(30, 38)]]
    alone = FORMAT.alone(documents[0])
    assert alone["input_ids"].tolist() == [[10, 11, 12]] and alone["attention_mask"].tolist() == [[1, 1, 1]]


def test_positions_of_the_room_do_not_exceed_those_of_the_samples() -> None:
    samples = [sample(10, 40), sample(60, 3)]
    made = batch(samples, length=130, form=replace(FORMAT, flash=True))
    assert made["position_ids"].tolist() == [[*range(40), *range(3), *range(40), *range(40), *range(7)]]
    assert made["cu_seq_lens_q"].tolist() == [0, 40, 43, 83, 123, 130]
    assert [d["input_ids"].tolist() for d in FORMAT.documents(made)] == [s["input_ids"] for s in samples]
    assert batch([sample(10, 2)], length=70)["position_ids"].max() == 31  # not a part for every two tokens


def test_padding_of_the_tokenizer_is_removed() -> None:
    padded = sample(10, 6, attention_mask=[0, 1, 1, 1, 0, 0], token_type_ids=[0, 0, 1, 1, 0, 0])
    rows = packed_rows(token_counts([padded]), 4, PackingStrategy.BEST_FIT)
    data = PackedDataset([padded], rows, token_counts([padded]))
    made = PackingCollator(default_data_collator, 4, FORMAT)([data[0]])
    assert made["input_ids"].tolist() == [[11, 12, 13, 0]]
    assert made["token_type_ids"].tolist() == [[0, 1, 1, 0]]


def test_a_collator_of_the_user_sees_each_sample_alone() -> None:
    seen = []

    def masks(samples: list[Any]) -> dict[str, torch.Tensor]:
        seen.append(len(samples))
        ids = torch.tensor([s["input_ids"] for s in samples])
        return {"input_ids": torch.full_like(ids, 3), "labels": ids, "attention_mask": torch.ones_like(ids)}

    made = batch([sample(10, 2), sample(20, 2)], length=4, collate=masks, form=replace(FORMAT, shifts_labels=False))
    assert seen == [1, 1]
    assert made["input_ids"].tolist() == [[3, 3, 3, 3]] and made["labels"].tolist() == [[10, 11, 20, 21]]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"pixel_values": [[0.0] * 4] * 4}, "packs text only, with one value for each token, but 'pixel_values'"),
        ({"label": 3, "labels": None}, "'labels' of a sample with 2 tokens is of shape \\[1\\]"),
        ({"position_ids": [0, 0]}, "they seem to be packed already"),
        ({"labels": [0.5, 0.5]}, "needs integer labels"),
    ],
)
def test_refusals(more: dict[str, Any], words: str) -> None:
    given = {key: value for key, value in {**sample(10, 2), **more}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        batch([given])


def test_a_sample_whose_length_changes_is_refused() -> None:
    counts = [3]
    data = PackedDataset([sample(10, 4)], packed_rows(counts, 8, PackingStrategy.BEST_FIT), counts)
    with pytest.raises(ConfigError, match="had 3 tokens when the rows were made, and has 4 now"):
        PackingCollator(default_data_collator, 8, FORMAT)([data[0]])


def test_lengths_of_a_table_are_read_from_its_columns() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [sample(3, n, attention_mask=[1] * (n - 1) + [0]) for n in (4, 2, 7)]
    table = datasets.Dataset.from_list(rows)
    assert token_counts(table).tolist() == token_counts(rows).tolist() == [3, 1, 6]
    assert token_counts(table.shuffle(seed=1).remove_columns("attention_mask")).sum() == 13
    assert token_counts(table.select([2, 0])).tolist() == [6, 3]
    with pytest.raises(ConfigError, match="sample 0 has no 'input_ids'"):
        token_counts([{"text": "a"}])


# -- streams -----------------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        lengths = torch.randint(1, 30, (samples,), generator=torch.Generator().manual_seed(0)).tolist()
        self.rows = [sample(index, n) for index, n in enumerate(lengths)]

    def __iter__(self) -> Any:
        return iter(self.rows)


class Stateful(Stream):
    read = 0

    def __iter__(self) -> Any:
        while self.read < len(self.rows):
            self.read += 1
            yield self.rows[self.read - 1]
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def contents(rows: Any) -> list[list[tuple[int, int, int]]]:
    return [[(piece.sample["input_ids"][0], piece.start, piece.length) for piece in row] for row in rows]


@pytest.mark.parametrize("strategy", PackingStrategy)
def test_a_stream_has_each_sample_once_in_windows(strategy: PackingStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_trainer.data.packing.datasets.WINDOW_ROWS", 8)
    stream = Stream(300)
    packed = PackedStream(stream, 50, strategy, seed=1)
    rows = contents(packed)
    assert sum(length for row in rows for _, _, length in row) == sum(len(s["input_ids"]) for s in stream.rows)
    assert {first for row in rows for first, _, _ in row} == set(range(300))
    assert packed.summary.rows == len(rows) and packed.summary.fill > 0.9
    assert max(first for first, _, _ in rows[0]) < 100  # of the first window, not of the whole stream
    assert contents(PackedStream(stream, 50, strategy, seed=1)) == rows


def test_a_stateful_stream_continues_inside_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_trainer.data.packing.datasets.WINDOW_ROWS", 8)
    whole = contents(packed_stream(Stateful(300), 50, PackingStrategy.BEST_FIT))
    for done in (1, 7, 8, 20):
        stream = packed_stream(Stateful(300), 50, PackingStrategy.BEST_FIT)
        assert isinstance(stream, StatefulPackedStream)
        rows = iter(stream)
        begin = contents(next(rows) for _ in range(done))
        state = stream.state_dict()
        again = packed_stream(Stateful(300), 50, PackingStrategy.BEST_FIT)
        again.load_state_dict(state)
        assert begin + contents(again) == whole
    assert not isinstance(packed_stream(Stream(3), 50, PackingStrategy.CUT), StatefulPackedStream)


def test_a_beginning_has_the_same_samples() -> None:
    rows = [[sample(10, 3), sample(20, 9)], [sample(30, 12)], [sample(40, 2), sample(50, 1), sample(60, 2)]]
    made = batch(*rows, length=14)
    assert {key: value.tolist() for key, value in FORMAT.beginning(made, 14).items()} == {
        key: value.tolist() for key, value in made.items()
    }
    few = FORMAT.beginning(made, 8)
    assert {key: list(value.shape) for key, value in few.items()} == {key: [3, 8] for key in made}
    wanted = [document["input_ids"][:2].tolist() for document in FORMAT.documents(made)]
    assert [document["input_ids"].tolist() for document in FORMAT.documents(few)] == wanted
    assert few["position_ids"][0].tolist() == [0, 1, 0, 1, 0, 1, 2, 3]  # two samples and padding
    assert few["labels"].eq(-100).sum() == 6 + (8 - 4) + (8 - 2) + (8 - 5)


def test_a_beginning_ends_inside_of_a_sample() -> None:
    made = batch([sample(10 * n, 3) for n in range(1, 7)], length=20)
    few = replace(FORMAT, numbers=True).beginning(made, 12)
    assert [len(document["input_ids"]) for document in FORMAT.documents(few)] == [3, 3, 3, 3]
    assert few["seq_idx"].tolist() == [[0] * 3 + [1] * 3 + [2] * 3 + [3] * 3]
    assert few["cu_seq_lens_q"].tolist() == [0, 3, 6, 9, 12]

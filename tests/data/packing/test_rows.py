"""Which samples share a row: every token once, full rows on real text, the same rows each time, and fast."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.order import DatasetOrder, epoch_order
from ds_trainer.data.packing.rows import PackedRows, best_fit_decreasing, packed_rows

BEST_FIT, CUT = PackingStrategy.BEST_FIT, PackingStrategy.CUT


@cache
def lengths_of_text() -> np.ndarray:
    """Words and signs of every paragraph of Python's own sources: ragged, from 1 to thousands of tokens."""
    import re

    files = sorted(Path(np.__file__).parents[1].glob("numpy/**/*.py"))[:150]
    text = "\n\n".join(path.read_text(errors="replace") for path in files)
    return np.array([len(re.findall(r"\w+|[^\w\s]", part)) for part in re.split(r"\n\s*\n", text)])


def random_lengths(count: int, longest: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, longest, count)


def pieces(rows: PackedRows) -> list[tuple[int, int, int]]:
    return [piece for index in range(len(rows)) for piece in rows.row(index)]


@pytest.mark.parametrize("strategy", [BEST_FIT, CUT])
@pytest.mark.parametrize("max_length", [1, 7, 64, 5000])
def test_every_token_is_in_one_row(strategy: PackingStrategy, max_length: int) -> None:
    lengths = random_lengths(100, 150)
    rows = packed_rows(lengths, max_length, strategy, epoch_order(100, 3, 0, True), 3)
    seen = [np.zeros(length, int) for length in lengths]
    for sample, start, length in pieces(rows):
        seen[sample][start : start + length] += 1
    kept = np.minimum(lengths, max_length) if strategy == BEST_FIT else lengths
    for tokens, wanted in zip(seen, kept, strict=True):
        assert tokens[:wanted].tolist() == [1] * wanted and not tokens[wanted:].any()
    sizes = [sum(length for _, _, length in rows.row(index)) for index in range(len(rows))]
    assert max(sizes) <= max_length and min(sizes) > 0
    summary = rows.summary
    assert (summary.tokens, summary.dropped) == (int(kept.sum()), int((lengths - kept).sum()))
    assert (summary.rows, summary.pieces) == (len(rows), len(pieces(rows)))
    assert summary.samples == int((lengths > 0).sum())


def test_samples_continue_in_the_next_row_when_they_are_cut() -> None:
    rows = packed_rows([5, 0, 2, 6], 4, CUT)
    assert [list(rows.row(index)) for index in range(4)] == [
        [(0, 0, 4)],
        [(0, 4, 1), (2, 0, 2), (3, 0, 1)],
        [(3, 1, 4)],
        [(3, 5, 1)],
    ]
    assert rows.summary.cut == 3 and rows.summary.dropped == 0


def test_a_sample_goes_to_the_row_with_the_least_room() -> None:
    # 6 and 5 open two rows of 10; 4 fits exactly beside 6, and 3 beside 5.
    assert best_fit_decreasing(np.array([3, 4, 5, 6, 2]), 10).tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("max_length", [2048, 4096])
@pytest.mark.parametrize("strategy", [BEST_FIT, CUT])
def test_rows_of_real_text_are_98_percent_full(strategy: PackingStrategy, max_length: int) -> None:
    lengths = lengths_of_text()
    rows = packed_rows(lengths, max_length, strategy, epoch_order(len(lengths), 42, 0, True), 42)
    assert len(lengths) > 5000 and rows.summary.rows > 20
    assert rows.summary.fill >= 0.98


def test_rows_depend_on_seed_and_lengths_alone() -> None:
    lengths = random_lengths(3_000, 300)

    def made(seed: int, given: np.ndarray = lengths) -> list[tuple[int, int, int]]:
        return pieces(packed_rows(given, 256, BEST_FIT, epoch_order(len(given), seed, 0, True), seed))

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert made(1) != made(1, lengths[::-1])


def test_a_fifth_of_a_million_samples_takes_a_second() -> None:
    lengths = random_lengths(200_000, 900)
    start = time.process_time()
    rows = packed_rows(lengths, 4096, BEST_FIT, DatasetOrder(len(lengths)))
    assert time.process_time() - start < 4  # 0.4 s on a quiet machine
    assert rows.summary.fill > 0.99


@pytest.mark.parametrize("strategy", [BEST_FIT, CUT])
def test_only_best_fit_has_windows(strategy: PackingStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are cut in order fill all rows but the last; best fit takes samples of one window at a time."""
    monkeypatch.setattr("ds_trainer.data.packing.rows.WINDOW_ROWS", 2)
    lengths = random_lengths(100, 50, seed=1)
    rows = packed_rows(lengths, 64, strategy)
    sizes = [sum(length for _, _, length in rows.row(index)) for index in range(len(rows))]
    samples = [sample for index in range(len(rows)) for sample, _, _ in rows.row(index)]
    if strategy == CUT:
        assert set(sizes[:-1]) == {64} and samples == sorted(samples)
    else:
        assert max(samples[: len(samples) // 10]) < len(lengths) // 4  # the first rows have the first samples


def test_the_summary_is_in_words_and_numbers() -> None:
    summary = packed_rows([30, 70, 120], 100, BEST_FIT).summary
    assert summary.text() == (
        "3 samples in 2 rows of 100 tokens, 100.0 % filled, 0.0 % padding, 1.5 samples a row, 20 tokens dropped"
    )
    assert summary.metrics()["packing_dropped_tokens"] == 20
    assert (summary + summary).rows == 4
    assert packed_rows([], 100, BEST_FIT).summary.fill == 0.0

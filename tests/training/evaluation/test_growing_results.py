"""Results that grow beyond what was known of them: more rows, then wider ones, then another type."""

from __future__ import annotations

import numpy as np
import pytest

from ds_trainer.training.evaluation.nested import PADDING
from ds_trainer.training.evaluation.prediction_accumulator import GrowingArray, PredictionAccumulator


def rows(first: int, count: int, width: int) -> np.ndarray:
    return np.arange(first, first + count)[:, None] * np.ones((1, width), dtype=np.int64)


@pytest.mark.parametrize("known", [0, 9, 30])
def test_a_growing_array_takes_wider_batches(known: int) -> None:
    """All rows stay, those of narrow batches are filled up on the right."""
    grown, wanted, first = GrowingArray(rows(0, 2, 3), known), [], 0
    for count, width in ((2, 3), (3, 3), (1, 5), (4, 2), (2, 6)):
        part = rows(first, count, width)
        grown.add(part)
        wanted += [[*row, *[PADDING] * (6 - width)] for row in part.tolist()]
        first += count
    assert grown.result().tolist() == wanted


def test_rows_at_given_indices_are_kept_when_the_array_grows() -> None:
    grown = GrowingArray(rows(0, 1, 2), 6)
    grown.add(rows(50, 2, 2), np.array([5, 0]))
    grown.add(rows(70, 2, 3), np.array([1, 4]))
    grown.add(rows(90, 2, 1), np.array([2, 3]))
    assert grown.result()[:, 0].tolist() == [51, 70, 90, 91, 71, 50]
    assert grown.result()[0].tolist() == [51, 51, PADDING]


def test_a_growing_array_widens_its_dtype() -> None:
    grown = GrowingArray(np.array([1, 2]))
    grown.add(np.array([1, 2]))
    grown.add(np.array([0.5]))
    assert grown.result().tolist() == [1.0, 2.0, 0.5]


def test_structures_grow_leaf_by_leaf() -> None:
    kept = PredictionAccumulator(join=True, samples_in_lists=False)
    for count, width in ((2, 2), (3, 4)):
        kept.add({"logits": rows(10, count, width), "score": np.arange(count)})
        kept.to_host()
    found = kept.result()
    assert found["score"].tolist() == [0, 1, 0, 1, 2]
    assert found["logits"].tolist()[0] == [10, 10, PADDING, PADDING]
    assert found["logits"].shape == (5, 4)


def test_indices_must_match_the_rows() -> None:
    grown = GrowingArray(rows(0, 2, 2), 4)
    with pytest.raises(TypeError, match="order of 1 samples must be restored, but an array has length 2"):
        grown.add(rows(0, 2, 2), np.array([0]))


def test_more_indices_than_rows() -> None:
    grown = GrowingArray(rows(0, 1, 2), 4)
    with pytest.raises(TypeError, match="order of 2 samples must be restored, but an array has length 1"):
        grown.add(rows(0, 1, 2), np.array([0, 1]))


@pytest.mark.parametrize("join", [True, False])
def test_batches_stay_in_order(join: bool) -> None:
    """Several wait on the device before they are brought to the host."""
    kept = PredictionAccumulator(join=join, samples_in_lists=False)
    for first in (0, 3, 6):
        kept.add(np.arange(first, first + 3))
    found = kept.result()
    assert (found if join else np.concatenate(found)).tolist() == list(range(9))

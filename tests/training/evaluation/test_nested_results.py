"""Joining of nested results: padded on the right, in the widest type, structure by structure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_trainer.training.evaluation.nested import PADDING, concatenate, to_numpy


@pytest.mark.parametrize("kind", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_narrow_rows_are_padded_on_the_right(kind: object) -> None:
    batches = [kind([[1, 2]]), kind([[3, 4, 5], [6, 7, 8]]), kind([[9]])]  # type: ignore[operator]
    wanted = [[1, 2, PADDING], [3, 4, 5], [6, 7, 8], [9, PADDING, PADDING]]
    assert concatenate(batches).tolist() == wanted


@pytest.mark.parametrize("kind", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_a_scalar_is_a_row(kind: object) -> None:
    assert concatenate([kind(1.5), kind(2.5)]).tolist() == [1.5, 2.5]  # type: ignore[operator]
    assert concatenate([kind(1.5)]).tolist() == [1.5]  # type: ignore[operator]


def test_the_widest_dtype_is_used() -> None:
    found = concatenate([np.array([[1, 2]]), np.array([[0.5]])])
    assert found.tolist() == [[1.0, 2.0], [0.5, PADDING]]


def test_nested_structures_are_concatenated() -> None:
    rows = torch.ones(2, 1)
    found = concatenate([{"a": (rows, None), "b": [rows]}, {"a": (rows, None), "b": [rows]}])
    assert found["a"][0].shape == (4, 1) and found["a"][1] is None and found["b"][0].shape == (4, 1)
    assert concatenate([["x"], ["y", "z"]], samples_in_lists=True) == ["x", "y", "z"]
    for batches in ([{"a": rows}, {"b": rows}], [(rows,), (rows, rows)], [rows, None], [None, rows]):
        with pytest.raises((TypeError, ValueError)):
            concatenate(batches)
    with pytest.raises(TypeError, match="different contents"):
        concatenate([{"a": rows}, {"a": rows, "b": rows}])


def test_bfloat16_becomes_float32_on_the_host() -> None:
    found = to_numpy({"a": torch.tensor([1.5], dtype=torch.bfloat16), "b": None, "c": "text"})
    assert found["a"].dtype == np.float32 and found["a"].tolist() == [1.5]
    assert found["b"] is None and found["c"] == "text"

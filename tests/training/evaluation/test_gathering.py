"""Gathering and joining of nested outputs by themselves: odd shapes, dtypes, structures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.gathering import gather_rounds
from ds_trainer.training.evaluation.nested import joined
from tests.support.pool import pool
from tests.support.predictions import refusal_of


def gather_odd_things() -> list[Any]:
    layout = ParallelLayout(2)
    rank = torch.distributed.get_rank()
    rows = torch.full((rank + 1, 2 + rank), rank)
    tree = {"a": (rows, None), "b": [rows.bool(), rows.to(torch.bfloat16), torch.tensor(0.5 + rank)]}
    whole = gather_rounds(tree, False, layout)
    first = gather_rounds(tree, rank == 1, layout)
    objects = gather_rounds([{"box": rows, "name": str(rank)}] * (rank + 1), False, layout, as_objects=True)
    words = refusal_of(gather_rounds, (rows,) if rank else rows, False, layout)
    wrong = refusal_of(gather_rounds, {"cache": "text" if rank else rows}, False, layout)
    a, b = whole["a"][0].tolist(), [leaf.float().tolist() for leaf in whole["b"]]
    return [a, whole["a"][1], b, first["a"][0].tolist(), [entry["name"] for entry in objects], words, wrong]


def test_gathering_of_odd_things() -> None:
    for a, nothing, b, first, names, words, wrong in pool(2).run(gather_odd_things):
        assert a == [[0, 0, -100], [1, 1, 1], [1, 1, 1]]
        assert nothing is None and b[2] == [0.5, 1.5]
        assert b[1] == [[0, 0, -100], [1, 1, 1], [1, 1, 1]]
        assert first == [[0, 0]]
        assert names == ["0", "1", "1"]
        assert "outputs of different structure" in words and "eval_use_gather_object=True" in words
        assert "is a str, which cannot be gathered" in wrong


def test_joining_refuses_what_does_not_fit() -> None:
    rows = np.zeros((2, 3))
    for pieces in ([rows, (rows,)], [(rows,), (rows, rows)], [{"a": rows}, {"b": rows}], ["x", "y"], [rows, rows[0]]):
        with pytest.raises(TypeError):
            joined(pieces)
    assert joined(["x", "y"], samples_in_lists=True) == ["x", "y"]
    assert joined([rows, np.ones((1, 5, 2))[..., 0]]).shape == (3, 5)

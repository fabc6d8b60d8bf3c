"""Gathering and joining of nested outputs by themselves: odd shapes, dtypes, structures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.gathering import gather_micro_steps
from ds_trainer.training.evaluation.nested import concatenate
from ds_trainer.utils import distributed
from tests.support.pool import pool
from tests.support.predictions import refusal_of


def gather_unusual_outputs() -> list[Any]:
    layout = ParallelLayout(2)
    rank = torch.distributed.get_rank()
    rows = torch.full((rank + 1, 2 + rank), rank)
    tree = {"a": (rows, None), "b": [rows.bool(), rows.to(torch.bfloat16), torch.tensor(0.5 + rank)]}
    gathered = gather_micro_steps(tree, False, layout)
    first = gather_micro_steps(tree, rank == 1, layout)
    objects = gather_micro_steps([{"box": rows, "name": str(rank)}] * (rank + 1), False, layout, as_objects=True)
    message = refusal_of(gather_micro_steps, (rows,) if rank else rows, False, layout)
    wrong = refusal_of(gather_micro_steps, {"cache": "text" if rank else rows}, False, layout)
    a, b = gathered["a"][0].tolist(), [leaf.float().tolist() for leaf in gathered["b"]]
    return [a, gathered["a"][1], b, first["a"][0].tolist(), [entry["name"] for entry in objects], message, wrong]


def test_gathering_of_unusual_outputs() -> None:
    for a, nothing, b, first, names, message, wrong in pool(2).run(gather_unusual_outputs):
        assert a == [[0, 0, -100], [1, 1, 1], [1, 1, 1]]
        assert nothing is None and b[2] == [0.5, 1.5]
        assert b[1] == [[0, 0, -100], [1, 1, 1], [1, 1, 1]]
        assert first == [[0, 0]]
        assert names == ["0", "1", "1"]
        assert "differ in structure" in message and "eval_use_gather_object=True" in message
        assert "is a str, which cannot be gathered" in wrong


def gather_keys_in_another_order() -> list[Any]:
    rank = distributed.rank()
    items = [("a", torch.full((2,), 10 + rank)), ("b", torch.full((2,), 20 + rank))]
    tree = gather_micro_steps(dict(items[::-1] if rank else items), False, ParallelLayout(2))
    return [tree["a"].tolist(), tree["b"].tolist()]


def test_the_order_of_keys_does_not_matter() -> None:
    assert pool(2).run(gather_keys_in_another_order) == [[[10, 10, 11, 11], [20, 20, 21, 21]]] * 2


def test_joining_rejects_mismatched_structures() -> None:
    rows = np.zeros((2, 3))
    for structures in (
        [rows, (rows,)],
        [(rows,), (rows, rows)],
        [{"a": rows}, {"b": rows}],
        ["x", "y"],
        [rows, rows[0]],
    ):
        with pytest.raises(TypeError):
            concatenate(structures)
    assert concatenate(["x", "y"], samples_in_lists=True) == ["x", "y"]
    assert concatenate([rows, np.ones((1, 5, 2))[..., 0]]).shape == (3, 5)


def exchanges_of_shapes() -> list[tuple[int, int]]:
    """How often whole descriptions, and only their numbers, are exchanged: for equal and other shapes, and a dummy."""
    layout, rank = ParallelLayout(distributed.world_size()), distributed.rank()
    kept, found = (distributed.gather_objects, distributed.gather_numbers), []
    for rows, dummy in ((3, False), (3 + rank, False), (3, rank == 1)):
        calls = [0, 0]

        def objects(value: Any, calls: list[int] = calls) -> Any:
            calls[0] += 1
            return kept[0](value)

        def numbers(value: Any, calls: list[int] = calls) -> Any:
            calls[1] += 1
            return kept[1](value)

        distributed.gather_objects, distributed.gather_numbers = objects, numbers
        try:
            tree = gather_micro_steps({"logits": torch.full((rows, 2), float(rank))}, dummy, layout)
        finally:
            distributed.gather_objects, distributed.gather_numbers = kept
        sizes = distributed.gather_objects(0 if dummy else rows)
        wanted = torch.cat([torch.full((size, 2), float(other)) for other, size in enumerate(sizes)])
        assert torch.equal(tree["logits"], wanted)
        found.append((calls[0], calls[1]))
    return found


def test_shapes_are_exchanged_only_if_they_differ_and_never_as_objects() -> None:
    assert pool(2).run(exchanges_of_shapes) == [[(0, 0), (0, 1), (0, 1)]] * 2

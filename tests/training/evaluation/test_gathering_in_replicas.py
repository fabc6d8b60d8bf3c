"""Results of replicas that are several ranks: of each replica once, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.gathering import gather_micro_steps
from tests.support.pool import pool


def gathered(layout: ParallelLayout, as_objects: bool, dummy: int) -> list[list[int]]:
    """Every rank has a row with its replica and itself; only the replica's is the same on its ranks, as it must be."""
    from ds_trainer.parallel.groups import parallel_groups

    replica = parallel_groups(layout).coordinates.dp
    rows: Any = torch.full((replica + 1, 2), 10 + replica)
    found = gather_micro_steps({"rows": rows}, replica == dummy, layout, as_objects)
    return found["rows"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"sp": 2}, {"tp": 4}], ids=str)
def test_every_replica_counts_once(axes: dict[str, int], as_objects: bool) -> None:
    layout = ParallelLayout(4, **axes)
    wanted = [[10 + replica] * 2 for replica in range(layout.dp) for _ in range(replica + 1)]
    assert pool(4).run(gathered, layout, as_objects, -1) == [wanted] * 4


@pytest.mark.parametrize("as_objects", [False, True])
def test_a_dummy_batch_counts_nothing(as_objects: bool) -> None:
    assert pool(4).run(gathered, ParallelLayout(4, tp=2), as_objects, 1) == [[[10, 10]]] * 4

"""The item count of ranks that hold different items: over a group, not all ranks; and when it is known."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.item_count import ItemCount
from ds_trainer.training.loop.loss_computation import LossComputation
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import train_and_report


def counted(overlap: bool) -> float:
    """Of four ranks, two and two hold the same items: 10 and 11 of them."""
    layout = ParallelLayout(4, tp=2)
    groups = parallel_groups(layout)
    local_items = torch.tensor(10 + groups.coordinates.dp)
    return float(ItemCount.of_all_ranks(local_items, overlap, groups.dp).exact())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_item_count_is_summed_over_the_group(overlap: bool) -> None:
    assert pool(4).run(counted, overlap) == [21.0] * 4


def trained(output_dir: str, waits_on: tuple[str, ...]) -> tuple[list[bool], Trajectory]:
    """Whether the count was known before the forward pass of each micro-batch, and the run."""
    known: list[bool] = []
    count_step, before = LossComputation.count_step, LossComputation.waits_on

    def counted(self: LossComputation, *given: Any) -> ItemCount:
        items = count_step(self, *given)
        known.append(items.is_exact)
        return items

    LossComputation.waits_on, LossComputation.count_step = waits_on, counted  # type: ignore[method-assign]
    try:
        return known, train_and_report(tiny_llama, partial(RaggedTokens, 37), output_dir, learning_rate=2e-3)
    finally:
        LossComputation.waits_on, LossComputation.count_step = before, count_step  # type: ignore[method-assign]


def test_a_cpu_waits_for_the_count_and_a_gpu_does_not(tmp_path: Path) -> None:
    assert LossComputation.waits_on == ("cpu",)
    of_cpu = pool(2).run(trained, str(tmp_path), ("cpu",))
    of_gpu = pool(2).run(trained, str(tmp_path), ())
    for (waited, one), (overlapped, other) in zip(of_cpu, of_gpu, strict=True):
        assert waited == [True] * 4 and overlapped == [False] * 4
        assert_equal(one, other, tolerance=1e-6)

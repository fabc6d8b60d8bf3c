"""Training with the loss in tiles gives the numbers of one plain process, on every layout and ZeRO stage."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.linear_cross_entropy import linear_cross_entropy
from ds_trainer.training.model.chunked_loss import linear_head
from tests.support.compare import assert_equal
from tests.support.layouts import DATA, MODELS, pad
from tests.support.oracle import Trajectory
from tests.support.pool import pool
from tests.support.runs import train_and_report
from tests.training.test_layouts import Case, arguments_of, case_of, reference

CHUNK = 5  # tokens: borders inside every sequence
PADDED = dict(data="padded", optimizer="sgd", clip=0.0)


class Tiles:
    """Counts the losses that are computed in tiles; with ``scale`` they are wrong."""

    def __init__(self, scale: float = 1.0) -> None:
        self.count, self.scale = 0, scale

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.count += 1
        return self.scale * linear_cross_entropy(*arguments)


def train_in_tiles(*arguments: Any, scale: float = 1.0, **keywords: Any) -> Trajectory:
    """:func:`train_and_report`, and all losses of the training were computed in tiles."""
    tiles = Tiles(scale)
    linear_head.linear_cross_entropy = tiles  # type: ignore[assignment]
    try:
        report = train_and_report(*arguments, **{"loss_chunk_tokens": CHUNK, **keywords})
    finally:
        linear_head.linear_cross_entropy = linear_cross_entropy
    assert tiles.count >= 4  # steps
    return report


def run(case: Case, output_dir: Any, **more: Any) -> list[Trajectory]:
    job = partial(train_in_tiles, MODELS[case.model], DATA[case.data], str(output_dir), Trainer, pad)
    return pool(case.layout.world_size).run(partial(job, **arguments_of(case), **more))


LAYOUTS = {
    "one rank, ZeRO 0": case_of(ParallelLayout(1), 0, **PADDED),
    "two ranks, ZeRO 2, tied": case_of(ParallelLayout(2), 2, model="tied", **PADDED),
    "two ranks, ZeRO 3, tied": case_of(ParallelLayout(2), 3, model="tied", **PADDED),
    "two ranks, ZeRO 3, biases": case_of(ParallelLayout(2), 3, model="multi_head", **PADDED),
    "partitioned vocabulary, ZeRO 1": case_of(ParallelLayout(2, tp=2), 1, **PADDED),
    "partitioned vocabulary, ZeRO 3, biases": case_of(ParallelLayout(4, tp=2), 3, model="multi_head", **PADDED),
    "Ulysses, ZeRO 1": case_of(ParallelLayout(2, sp=2), 1, **PADDED),
    "ring, ZeRO 3": case_of(ParallelLayout(2, cp=2), 3, **PADDED),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_trajectory_is_that_of_one_process(name: str, tmp_path: Any) -> None:
    case = LAYOUTS[name]
    wanted = reference(case.model, case.data, case.optimizer, case.clip)
    for found in run(case, tmp_path):
        assert_equal(found, wanted)

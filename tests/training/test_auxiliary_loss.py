"""A router's auxiliary loss counts once: the mean of the micro-batches' own terms, weighted with their items."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from tests.support.compare import assert_equal, distances
from tests.support.experts import COEFFICIENT, FAMILIES, mixtral, step_loss
from tests.support.models import RaggedTokens
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

SAMPLES, GLOBAL_BATCH = 32, 16
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0}

make_data = partial(RaggedTokens, SAMPLES)


def equal(micro: int, samples: int) -> list[int]:
    return [micro] * (samples // micro)


@cache
def reference(family: str, micro: int) -> Trajectory:
    """``micro``: samples of a micro-batch."""
    loss = partial(step_loss, sizes=partial(equal, micro))
    return train_plainly(FAMILIES[family](), make_data(), loss=loss, optimizer="sgd", learning_rate=0.3)


def run(output_dir: Any, world: int, make_model: Any = mixtral, **arguments: Any) -> list[Trajectory]:
    job = partial(train_and_report, make_model, arguments.pop("data", make_data), str(output_dir))
    return pool(world).run(partial(job, arguments.pop("trainer_class", Trainer), **{**SGD, **arguments}))


def sizes(world: int, accumulation: int) -> dict[str, int]:
    micro = GLOBAL_BATCH // (world * accumulation)
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}


PLACES = [
    (1, 0, 1), (1, 1, 2), (1, 2, 8), (1, 3, 8), (2, 0, 2), (2, 1, 8), (2, 2, 1), (2, 3, 2), (4, 0, 1), (4, 1, 2),
    (4, 2, 2), (4, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("world", "stage", "accumulation"), PLACES)
def test_trajectory_is_that_of_one_process(world: int, stage: int, accumulation: int, tmp_path: Any) -> None:
    """Loss, gradient norm and weights after four steps, at every stage and number of ranks and micro-batches."""
    arguments = {**sizes(world, accumulation), "zero_stage": stage}
    wanted = reference("mixtral", arguments["per_device_train_batch_size"])
    for found in run(tmp_path, world, **arguments):
        assert_equal(found, wanted)

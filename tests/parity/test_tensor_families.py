"""Tensor parallelism of model families: the numbers of one process, at ZeRO 0 and 3.

Stochastic gradient descent: the gradient of a key's bias is nothing but rounding, which Adam would make as large as
any other.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.compare import assert_equal, distances
from tests.support.models import RaggedTokens
from tests.support.oracle import Trajectory, token_loss, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report
from tests.support.tensor_models import ENCODER_DECODERS, FAMILIES, MIXER_CUT, Mixer

make_data = partial(RaggedTokens, 37)
RATE, CLIP = 0.2, 0.5
ARGUMENTS: dict[str, Any] = dict(
    optim="sgd",
    learning_rate=RATE,
    weight_decay=0.0,
    max_grad_norm=CLIP,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_steps=3,
)


def unshifted(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of an encoder-decoder model."""
    labels = batch["labels"]
    logits = model(**batch)["logits"].float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (labels != -100).sum()


def plainly(model: Any, loss: Any = token_loss) -> Trajectory:
    return train_plainly(
        model, make_data(), loss=loss, optimizer="sgd", learning_rate=RATE, weight_decay=0.0, clip=CLIP, steps=3
    )


@cache
def reference(family: str) -> Trajectory:
    return plainly(FAMILIES[family](), unshifted if family in ENCODER_DECODERS else token_loss)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_trajectory_is_that_of_one_process(family: str, stage: int, tmp_path: Any) -> None:
    job = partial(
        train_and_report,
        FAMILIES[family],
        make_data,
        str(tmp_path),
        zero_stage=stage,
        tensor_parallel_size=2,
        **ARGUMENTS,
    )
    for found in pool(2).run(job):
        assert_equal(found, reference(family))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plain_module_is_cut_as_its_user_says(stage: int, tmp_path: Any) -> None:
    job = partial(
        train_and_report,
        Mixer,
        make_data,
        str(tmp_path),
        zero_stage=stage,
        tensor_parallel_size=2,
        deepspeed=MIXER_CUT,
        **ARGUMENTS,
    )
    for found in pool(2).run(job):
        assert_equal(found, plainly(Mixer()))

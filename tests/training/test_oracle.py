"""Every layout gives the numbers of one process: loss, gradient norm, learning rate and weights against plain PyTorch.

37 samples in global batches of 16: the last batch of an epoch has 5, so that windows are partial, shards are ragged
and, at world 4, replicas work on dummies. Every micro-batch has another number of target tokens.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import pytest

from ds_trainer import Trainer
from tests.support.compare import assert_equal, distances
from tests.support.models import PlainLanguageModel, RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.oracle import Trajectory, sample_loss, train_plainly
from tests.support.pool import pool
from tests.support.runs import train_and_report

GLOBAL_BATCH = 16
SAMPLES = 37
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw_torch_fused", "learning_rate": 2e-3},
    "sgd": {"optim": "sgd", "learning_rate": 0.3},
}
CLIP = 0.7  # below every gradient norm of these runs, so that clipping always acts

make_data = partial(RaggedTokens, SAMPLES)


@cache
def reference(optimizer: str, clip: float) -> Trajectory:
    learning_rate = OPTIMIZERS[optimizer]["learning_rate"]
    return train_plainly(tiny_llama(), make_data(), optimizer=optimizer, clip=clip, learning_rate=learning_rate)


def sizes(world: int, accumulation: int) -> dict[str, int]:
    micro = GLOBAL_BATCH // (world * accumulation)
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}


SETUPS = list(product((1, 2, 4), (0, 1, 2, 3), (1, 2, 4)))  # world, stage, accumulation
STEPS = list(product(("adamw", "sgd"), (0.0, CLIP)))
# Every setup with one kind of step, in turn; the others are in the matrix.
CHOSEN = [(*place, *STEPS[index % 4]) for index, place in enumerate(SETUPS)]


def check(world: int, stage: int, accumulation: int, optimizer: str, clip: float, tmp_path: Any) -> None:
    arguments = {**OPTIMIZERS[optimizer], **sizes(world, accumulation), "max_grad_norm": clip, "zero_stage": stage}
    job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), **arguments)
    wanted = reference(optimizer, clip)
    assert clip == 0.0 or min(wanted.grad_norms) > clip
    for found in pool(world).run(job):
        assert_equal(found, wanted)


@pytest.mark.cases(2, "2-0-2-adamw-0.7", "2-2-2-sgd-0.7")
@pytest.mark.parametrize(("world", "stage", "accumulation", "optimizer", "clip"), CHOSEN)
def test_trajectory_is_that_of_one_process(
    world: int, stage: int, accumulation: int, optimizer: str, clip: float, tmp_path: Any
) -> None:
    check(world, stage, accumulation, optimizer, clip, tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_case" in metafunc.fixturenames:
        asked = "matrix" in metafunc.config.option.markexpr
        metafunc.parametrize("any_case", [(*p, *s) for p, s in product(SETUPS, STEPS)] if asked else [])


@pytest.mark.matrix
def test_whole_matrix(any_case: tuple[Any, ...], tmp_path: Any) -> None:
    check(*any_case, tmp_path)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_world_of_eight(stage: int, tmp_path: Any) -> None:
    arguments = {**OPTIMIZERS["adamw"], **sizes(8, 2), "max_grad_norm": CLIP, "zero_stage": stage}
    for found in pool(8).run(partial(train_and_report, tiny_llama, make_data, str(tmp_path), **arguments)):
        assert_equal(found, reference("adamw", CLIP))


@pytest.mark.parametrize("stage", [0, 3])
def test_model_that_returns_only_a_mean_loss(stage: int, tmp_path: Any) -> None:
    """Its means are weighted with their own token counts: the same numbers as the sum over all tokens."""
    wanted = train_plainly(PlainLanguageModel(), make_data(), learning_rate=2e-3)
    arguments = {**OPTIMIZERS["adamw"], **sizes(2, 4), "max_grad_norm": 0.0, "zero_stage": stage}
    for found in pool(2).run(partial(train_and_report, PlainLanguageModel, make_data, str(tmp_path), **arguments)):
        assert_equal(found, wanted)


def test_loss_per_sample(tmp_path: Any) -> None:
    """A regression: items are samples, and ragged micro-batches weigh by their samples."""
    make_rows = partial(regression_rows, SAMPLES)
    wanted = train_plainly(Regression(), make_rows(), loss=sample_loss, learning_rate=2e-3)
    arguments = {**OPTIMIZERS["adamw"], **sizes(4, 2), "max_grad_norm": 0.0, "zero_stage": 2}
    for found in pool(4).run(partial(train_and_report, Regression, make_rows, str(tmp_path), **arguments)):
        assert_equal(found, wanted)


class IgnoresTheCount(Trainer):
    """Negative control: takes the mean of a micro-batch for a part of the global mean, as many loops do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ds_trainer.losses.rule.normalized = False
        self._ds_trainer.losses.rule.verified = True
        accumulation = self.args.gradient_accumulation_steps
        ranks = self.layout.dp
        self._ds_trainer.losses.rule.contribution = lambda loss, own, items: loss / (accumulation * ranks)  # type: ignore[method-assign]


def test_control_a_wrong_normalizer_is_detected(tmp_path: Any) -> None:
    arguments = {**OPTIMIZERS["adamw"], **sizes(2, 2), "max_grad_norm": 0.0, "zero_stage": 1}
    job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), IgnoresTheCount, **arguments)
    for found in pool(2).run(job):
        differences = distances(found, reference("adamw", 0.0))
        assert differences["losses"] > 1e-3
        assert differences["grad_norms"] > 1e-3
        assert differences["weights"] > 1e-3


BF16_TOLERANCE = {0: 0.02, 1: 0.01, 2: 0.01, 3: 0.01}


@pytest.mark.cases(3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_agrees_with_a_bf16_reference(stage: int, tmp_path: Any) -> None:
    """bf16 micro_steps to 3 significant digits; stage 0 keeps gradients in bf16 while it sums them over ranks."""
    model = tiny_llama()
    wanted = train_plainly(model, make_data(), learning_rate=2e-3, autocast=True)
    arguments = {**OPTIMIZERS["adamw"], **sizes(2, 2), "max_grad_norm": 0.0, "zero_stage": stage, "bf16": True}
    for found in pool(2).run(partial(train_and_report, tiny_llama, make_data, str(tmp_path), **arguments)):
        differences = distances(found, wanted)
        assert differences["losses"] < BF16_TOLERANCE[stage], differences
        assert differences["grad_norms"] < 5 * BF16_TOLERANCE[stage], differences
        assert differences["weights"] < 5 * BF16_TOLERANCE[stage], differences


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_torch_autocast_agrees_with_autocast_in_one_process(stage: int, tmp_path: Any) -> None:
    wanted = train_plainly(tiny_llama(), make_data(), learning_rate=2e-3, autocast=True)
    arguments = {**OPTIMIZERS["adamw"], **sizes(2, 2), "max_grad_norm": 0.0, "zero_stage": stage}
    job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), torch_autocast="bf16", **arguments)
    for found in pool(2).run(job):
        differences = distances(found, wanted)
        assert differences["losses"] < 0.005, differences
        assert differences["weights"] < 0.02, differences


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_offload_is_exact(stage: int, tmp_path: Any) -> None:
    arguments = {**OPTIMIZERS["adamw"], **sizes(2, 2), "max_grad_norm": CLIP, "zero_stage": stage}
    job = partial(train_and_report, tiny_llama, make_data, str(tmp_path), offload_optimizer="cpu", **arguments)
    for found in pool(2).run(job):
        assert_equal(found, reference("adamw", CLIP))


def test_oracle_model_has_ragged_targets() -> None:
    """The data really is what the module's text says."""
    counts = {int((row["labels"][1:] != -100).sum()) for row in make_data().rows}
    assert len(counts) > 5

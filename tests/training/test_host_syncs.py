"""Steps of real runs make the host wait for the device nowhere in this package: counted with a pretended device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.checkpoint.background.writing import BackgroundSave
from tests.support.host_syncs import DEVICE, HostSync, PretendedDevice, counted
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.training.test_streams import Stream

FIRST, LAST = 3, 6  # the steps from after FIRST to the end of LAST are watched
STEPS = LAST - FIRST
ACCUMULATION = 2

# ZeRO 0 in float32, where DeepSpeed computes no norm: whether the gradient is finite, once a step (docs/throughput.md).
NORM_OF_STAGE_0 = ("item", "ds_trainer/engine/training_engine.py step")


class Watch(TrainerCallback):
    """Watches steps, or the rounds in the middle of an evaluation."""

    def __init__(self, device: PretendedDevice, evaluation: bool) -> None:
        self._device, self._evaluation, self._rounds = device, evaluation, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if not self._evaluation:
            self._device.watching = FIRST <= state.global_step < LAST

    def on_prediction_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self._rounds += 1
        if self._evaluation:
            self._device.watching = FIRST <= self._rounds < LAST


class OwnCallback(TrainerCallback):
    """Something of a user's, so that ranks must agree after every step."""


def watched_run(
    output_dir: str,
    make_model: Callable[[], Any] = tiny_llama,
    trainer_class: type[Trainer] = Trainer,
    own_callback: bool = False,
    stream: bool = False,
    evaluation: bool = False,
    metrics: bool = False,
    saving: bool = False,
    **arguments: Any,
) -> list[HostSync]:
    """Train on this rank; what was found in the steps (or rounds of an evaluation) that are watched."""
    values: dict[str, Any] = dict(
        learning_rate=1e-2,
        logging_steps=100,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        max_steps=LAST + 1,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=ACCUMULATION,
        eval_accumulation_steps=100,  # on a GPU all is kept there by default
        report_to="none",
    )
    if saving:
        values |= {"save_strategy": "steps", "save_steps": FIRST - 1}
    if evaluation:
        values |= {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    device, release = PretendedDevice(), threading.Event()
    with device.pretended(), held_back(release) if saving else threading.Lock():
        trainer = trainer_class(
            make_model(),
            TrainingArguments(output_dir, **{**values, **arguments}),
            train_dataset=Stream(200) if stream else RaggedTokens(200),
            eval_dataset=RaggedTokens(48) if evaluation else None,
            compute_metrics=(lambda prediction: {"rows": float(len(prediction.predictions))}) if metrics else None,
            callbacks=[OwnCallback()] if own_callback else None,
        )
        trainer.callback_handler.add_callback(Watch(device, evaluation))  # not as one of a user's
        if saving:
            trainer.callback_handler.add_callback(ReleaseAtEnd(release))
        trainer.train()
        trainer.engine.close()
    return device.records


class ReleaseAtEnd(TrainerCallback):
    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == LAST:
            self._release.set()


class held_back:
    """Inside, a save in the background is under way until it is released."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def __enter__(self) -> None:
        self._done = BackgroundSave.done
        release, done = self._release, self._done
        BackgroundSave.done = property(lambda save: release.is_set() and done.fget(save))  # type: ignore

    def __exit__(self, *error: Any) -> None:
        BackgroundSave.done = self._done  # type: ignore[method-assign]


def ours(records: list[HostSync]) -> dict[tuple[str, str], int]:
    """What this package or the test's own hooks asked for, whatever lies between that and the operation."""
    return dict(counted([one for one in records if one.origin not in ("deepspeed", "transformers")]))


def norm_of(stage: int) -> dict[tuple[str, str], int]:
    return {NORM_OF_STAGE_0: STEPS} if stage == 0 else {}


@pytest.mark.parametrize(
    ("world", "stage", "arguments"),
    [
        (1, 0, {}),
        (1, 2, {"bf16": True}),
        (2, 0, {"make_model": PlainLanguageModel}),
        (2, 1, {"bf16": True}),
        (2, 2, {}),
        (2, 3, {"bf16": True}),
        (2, 2, {"context_parallel_size": 2}),
        (2, 1, {"tensor_parallel_size": 2}),
    ],
)
def test_a_step_waits_for_nothing(world: int, stage: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    for found in pool(world).run(partial(watched_run, str(tmp_path), zero_stage=stage, **arguments)):
        assert ours(found) == norm_of(stage)


@pytest.mark.parametrize("world", [1, 2])
def test_nor_does_one_of_a_loss_that_is_a_mean(world: int, tmp_path: Path) -> None:
    for found in pool(world).run(partial(watched_run, str(tmp_path), PlainLanguageModel, zero_stage=2)):
        assert ours(found) == {}


def test_callbacks_of_a_user_are_agreed_on_between_hosts(tmp_path: Path) -> None:
    """Once a step, since what a callback decides after a step holds for that step. The device is not asked."""
    for found in pool(2).run(partial(watched_run, str(tmp_path), zero_stage=2, own_callback=True)):
        assert ours(found) == {("host collective allreduce_", "ds_trainer/utils/distributed.py agree"): STEPS}


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_under_way_is_not_asked_for(world: int, tmp_path: Path) -> None:
    for found in pool(world).run(partial(watched_run, str(tmp_path), zero_stage=1, saving=True)):
        assert ours(found) == {}


def test_ranks_compare_what_they_read_of_a_stream_between_hosts(tmp_path: Path) -> None:
    for found in pool(2).run(partial(watched_run, str(tmp_path), zero_stage=2, stream=True)):
        assert ours(found) == {("host collective allreduce_", "ds_trainer/utils/distributed.py agree"): STEPS}


@pytest.mark.parametrize("make_model", [tiny_llama, PlainLanguageModel])
@pytest.mark.parametrize("arguments", [{}, {"context_parallel_size": 2}])
def test_rounds_of_an_evaluation(make_model: Callable[[], Any], arguments: dict[str, Any], tmp_path: Path) -> None:
    if arguments and make_model is PlainLanguageModel:
        make_model = tiny_llama
    for found in pool(2).run(partial(watched_run, str(tmp_path), make_model, evaluation=True, **arguments)):
        assert ours(found) == {}


@pytest.mark.parametrize("world", [1, 2])
def test_predictions_are_gathered_without_asking_the_device(world: int, tmp_path: Path) -> None:
    for found in pool(world).run(partial(watched_run, str(tmp_path), evaluation=True, metrics=True)):
        shapes = ("host collective all_gather_object", "ds_trainer/utils/distributed.py gather_objects")
        assert ours(found) == ({shapes: STEPS} if world > 1 else {})

"""Steps of real runs make the host wait for the device nowhere in this package: counted with a pretended device."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.checkpoint.background.background_save import BackgroundSave
from tests.support.host_syncs import DEVICE, HostSync, PretendedDevice, counted
from tests.support.models import PlainLanguageModel, RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.training.test_streams import Stream

FIRST, LAST = 4, 7  # the steps from after FIRST to the end of LAST are watched
STEPS = LAST - FIRST
ACCUMULATION = 2

# ZeRO 0 in float32, where DeepSpeed computes no norm: whether the gradient is finite, once a step
# (docs/reference/throughput.md).
NORM_OF_STAGE_0 = ("item", "ds_trainer/engine/training_engine.py step")


class Watch(TrainerCallback):
    """Watches steps, or the micro_steps in the middle of an evaluation."""

    def __init__(self, device: PretendedDevice, evaluation: bool, release: threading.Event) -> None:
        self._device, self._evaluation, self._rounds = device, evaluation, 0
        self._release = release

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if not self._evaluation:
            self._device.watching = FIRST <= state.global_step < LAST
        if state.global_step == LAST:
            self._release.set()

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
    device: PretendedDevice | None = None,
    **arguments: Any,
) -> list[HostSync]:
    """Train on this rank; what was found in the steps (or micro_steps of an evaluation) that are watched."""
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
        values |= {"save_strategy": "steps", "save_steps": FIRST}
    if evaluation:
        values |= {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    device, release = device or PretendedDevice(), threading.Event()
    with device.pretended(), held_back_until(release) if saving else nullcontext():
        trainer = trainer_class(
            make_model(),
            TrainingArguments(output_dir, **{**values, **arguments}),
            train_dataset=Stream(200) if stream else RaggedTokens(200),
            eval_dataset=RaggedTokens(48) if evaluation else None,
            compute_metrics=(lambda prediction: {"rows": float(len(prediction.predictions))}) if metrics else None,
            callbacks=[OwnCallback()] if own_callback else None,
        )
        trainer.callback_handler.add_callback(Watch(device, evaluation, release))  # not as one of a user's
        trainer.train()
        trainer.engine.close()
    return device.records


@contextmanager
def held_back_until(release: threading.Event) -> Iterator[None]:
    """Inside, a save in the background is written, but not done before ``release``."""

    def save(work: BackgroundSave) -> Path:
        path = original(work)
        release.wait()
        return path

    original = BackgroundSave._save
    with mock.patch.object(BackgroundSave, "_save", save):
        yield


def ours(records: list[HostSync]) -> dict[tuple[str, str], int]:
    """What this package or the test's own hooks asked for, whatever lies between that and the operation."""
    found = dict(counted([one for one in records if one.origin not in ("deepspeed", "transformers")]))
    return {BETWEEN_HOSTS["shard"] if what == _RECEIVES else what: number for what, number in found.items()}


# Each waits for the slowest host, and not for the device.
BETWEEN_HOSTS = {
    "decision": ("host collective allreduce_", "ds_trainer/utils/distributed.py largest"),
    "shapes": ("host collective all_gather_object", "ds_trainer/utils/distributed.py gather_objects"),
    "batch": ("host collective broadcast_", "ds_trainer/data/batch_transfer.py _broadcast"),
    "shard": ("host collective send", "ds_trainer/data/batch_transfer.py send"),
}
_RECEIVES = ("host collective recv_", "ds_trainer/data/batch_transfer.py _take")  # the other end of "shard"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world", "stage", "arguments", "allowed"),
    [
        (1, 0, {}, {NORM_OF_STAGE_0: STEPS}),
        (1, 2, {"bf16": True}, {}),
        (1, 1, {"packing": True, "max_length": 64}, {}),
        (1, 1, {"make_model": PlainLanguageModel}, {}),
        (2, 0, {"make_model": PlainLanguageModel}, {NORM_OF_STAGE_0: STEPS}),
        (2, 1, {"bf16": True}, {}),
        (2, 2, {}, {}),
        (2, 3, {"bf16": True}, {}),
        (
            *(2, 2, {"context_parallel_size": 2}),
            dict.fromkeys((BETWEEN_HOSTS["batch"], BETWEEN_HOSTS["shard"]), STEPS * ACCUMULATION),
        ),
        (2, 1, {"tensor_parallel_size": 2}, {BETWEEN_HOSTS["batch"]: STEPS * ACCUMULATION}),
        # What a callback decides after a step holds for that step, and data that ended ends the epoch.
        (2, 2, {"own_callback": True}, {BETWEEN_HOSTS["decision"]: STEPS}),
        (2, 2, {"stream": True}, {BETWEEN_HOSTS["decision"]: STEPS}),
    ],
)
def test_a_step_does_not_wait_for_the_device(
    world: int, stage: int, arguments: dict[str, Any], allowed: dict[Any, int], tmp_path: Path
) -> None:
    for found in pool(world).run(partial(watched_run, str(tmp_path), zero_stage=stage, **arguments)):
        assert ours(found) == allowed


@pytest.mark.cases(1)
@pytest.mark.parametrize("world", [1, 2])
def test_a_background_save_does_not_wait_for_the_device(world: int, tmp_path: Path) -> None:
    """What belongs to its beginning, at the first of the steps, has passed through the functions that begin it."""
    for found in pool(world).run(partial(watched_run, str(tmp_path), zero_stage=1, saving=True)):
        begins = ("save_in_background", "flush")
        assert ours([one for one in found if not any(map(one.passes, begins))]) == {}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world", "arguments", "allowed"),
    [
        (1, {"make_model": PlainLanguageModel}, {}),
        (2, {"make_model": PlainLanguageModel}, {}),
        (2, {"context_parallel_size": 2}, {BETWEEN_HOSTS["batch"]: STEPS}),
        (1, {"metrics": True}, {}),
        (2, {"metrics": True}, {BETWEEN_HOSTS["shapes"]: STEPS}),
    ],
)
def test_an_evaluation_does_not_wait_for_the_device(
    world: int, arguments: dict[str, Any], allowed: dict[Any, int], tmp_path: Path
) -> None:
    for found in pool(world).run(partial(watched_run, str(tmp_path), evaluation=True, **arguments)):
        assert ours(found) == allowed


def _gradient(there: torch.Tensor) -> torch.Tensor:
    weights = there.detach().clone().requires_grad_()
    weights.to(torch.bfloat16).sum().backward()
    assert weights.grad is not None
    return weights.grad


CONTROLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "item": lambda there, here: there[0].item(),
    "bool": lambda there, here: bool(there[0] > 0),
    "int": lambda there, here: int(there[0]),
    "float": lambda there, here: f"{there[0]:.3f}",
    "tolist": lambda there, here: there.tolist(),
    "numpy": lambda there, here: there.numpy(),
    "asarray": lambda there, here: np.asarray(there),
    "cpu": lambda there, here: there.cpu(),
    "to the host": lambda there, here: there.to("cpu"),
    "to the host, another type": lambda there, here: there.to("cpu", torch.float64),
    "as_tensor of the host": lambda there, here: torch.as_tensor(there, device="cpu"),
    "after the gradient of a change of type": lambda there, here: _gradient(there).tolist(),
    "to the device": lambda there, here: here.to(DEVICE),
    "like a tensor there": lambda there, here: here.to(there),
    "tensor": lambda there, here: torch.tensor(3.0, device=DEVICE),
    "as_tensor": lambda there, here: torch.as_tensor(3, device=there.device),
    "new_tensor": lambda there, here: there.new_tensor([3.0]),
    "copied there": lambda there, here: there.copy_(here),
    "copied here": lambda there, here: here.copy_(there),
    "slice written": lambda there, here: there[:2].copy_(here[:2]),
    "nonzero": lambda there, here: there.nonzero(),
    "mask": lambda there, here: there[there > 0],
    "unique": lambda there, here: there.unique(),
    "masked_select": lambda there, here: there.masked_select(there > 0),
    "equal": lambda there, here: torch.equal(there, there),
    "print": lambda there, here: str(there),
    "pickle": lambda there, here: pickle.dumps(there),
    "synchronize": lambda there, here: torch.cuda.synchronize(),
    "event": lambda there, here: torch.cuda.Event.synchronize(None),  # type: ignore[arg-type]
}
HARMLESS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "on the host": lambda there, here: (here.tolist(), bool(here.sum()), here[here > 0], here.numpy()),
    "copied to the host before": lambda there, here: there.to("cpu", non_blocking=True).tolist(),
    "on the device": lambda there, here: (there + 1).double().to(DEVICE).clamp(min=0).sum(),
    "without blocking": lambda there, here: (here.to(DEVICE, non_blocking=True), there.copy_(here, non_blocking=True)),
    "filled in": lambda there, here: torch.full((), 3.0, device=there.device) * there,
}


def controls(output_dir: str) -> dict[str, int]:
    """How often each kind was found in one run that does all of them in every micro-batch."""
    found: dict[str, int] = dict.fromkeys({**CONTROLS, **HARMLESS}, 0)

    class Waiting(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = super().training_step(model, inputs, num_items_in_batch)
            for kind, waits in {**CONTROLS, **HARMLESS}.items():
                before = len(device.records)
                waits(loss.repeat(3), torch.ones(3))
                found[kind] += len(device.records) - before
            return loss

    device = PretendedDevice()
    watched_run(output_dir, trainer_class=Waiting, zero_stage=1, device=device)
    return found


def test_control_every_kind_of_host_sync_is_found(tmp_path: Path) -> None:
    """Negative control: each kind, put into the steps of a run, is found in every micro-batch, and nothing else is."""
    (found,) = pool(1).run(controls, str(tmp_path))
    assert {kind for kind in HARMLESS if found[kind]} == set()
    assert {kind for kind in CONTROLS if found[kind] != STEPS * ACCUMULATION} == set()

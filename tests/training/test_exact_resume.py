"""A run that is stopped and resumed is bit-identical to an uninterrupted one; and missing state is detected."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from ds_trainer import ConfigError, Trainer, TrainerCallback
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from tests.support.oracle import stack
from tests.support.pool import pool
from tests.support.resuming import AugmentedStream, Tokens, differences, make, record_batches, run, run_record

_STREAMS = ("stream", "stateful_stream", "augmented_stream")
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero {stage}": (2, {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
    **{f"bf16, zero {stage}": (2, {"zero_stage": stage, "bf16": True}) for stage in (0, 1, 3)},
    "accumulation": (2, {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}),
    "random numbers of each replica": (2, {"replica_specific_rng": True, "gradient_accumulation_steps": 2}),
    "offload": (2, {"zero_stage": 2, "offload_optimizer": "cpu"}),
    "linear": (1, {"lr_scheduler_type": "linear"}),
    "restarts": (1, {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}),
    "workers": (2, {"dataloader_num_workers": 2}),
    "persistent workers": (
        1,
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "per_device_train_batch_size": 8},
    ),
    "augmented": (2, {"data": "augmented"}),
    "augmented, workers": (2, {"data": "augmented", "dataloader_num_workers": 2}),
    "augmented, next epoch": (1, {"data": "augmented", "per_device_train_batch_size": 8, "max_steps": 10, "stop": 7}),
    **{data: (1 if data.startswith("augmented") else 2, {"data": data}) for data in _STREAMS},
    **{f"{data}, workers": (2, {"data": data, "dataloader_num_workers": 2}) for data in _STREAMS[:2]},
    "stateful_stream, next epoch": (
        1,
        {"data": "stateful_stream", "per_device_train_batch_size": 8, "max_steps": 10, "stop": 7},
    ),
    "packed": (2, {"data": "packed", "dropout": 0.0}),
    "grouped by length": (1, {"train_sampling_strategy": "group_by_length"}),
    "tp 2": (2, {"tensor_parallel_size": 2}),
    "tp 2, zero 3, augmented": (2, {"tensor_parallel_size": 2, "zero_stage": 3, "data": "augmented"}),
    "sp 2": (2, {"sequence_parallel_size": 2, "zero_stage": 1, "dropout": 0.0}),
    "cp 2": (2, {"context_parallel_size": 2, "zero_stage": 2, "dropout": 0.0}),
    "shards": (2, {"data": "table_stream", "stream_shards": "auto"}),
    "shards, workers, accumulation": (
        2,
        {
            **{"data": "table_stream", "stream_shards": "auto", "dataloader_num_workers": 2},
            **{"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "stop": 3},
        },
    ),
    "shards without a state": (2, {"data": "shuffled_table_stream", "stream_shards": 4, "stop": 3}),
    "tp 2, stream": (2, {"tensor_parallel_size": 2, "data": "stream"}),
    "tp 2, stateful stream": (2, {"tensor_parallel_size": 2, "data": "stateful_stream"}),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_bit_identical(name: str, tmp_path: Path) -> None:
    world, case = CASES[name]
    arguments = dict(case)
    stop = arguments.pop("stop", 4)
    arguments["save_steps"] = stop
    uninterrupted = pool(world).run(partial(run, str(tmp_path / "whole"), **arguments))
    pool(world).run(partial(run, str(tmp_path / "parts"), stop_at=stop, **arguments))
    found = pool(world).run(partial(run, str(tmp_path / "parts"), True, seed=1, **arguments))
    for one, other in zip(found, uninterrupted, strict=True):
        trained = (other.step - stop) * arguments.get("gradient_accumulation_steps", 1)
        assert differences(one, other, trained) == []
        assert 0 < len(one.batches) < len(other.batches)


# -- negative controls: missing state is detected ----------------------------------------------------------------------


def without_restoring(piece: str) -> tuple[Any, str, Any]:
    """Which function to replace, and with what, so that ``piece`` is not restored."""
    from ds_trainer.callbacks.state import TrainerState
    from ds_trainer.checkpoint import manager
    from ds_trainer.checkpoint.shards import engine_files
    from ds_trainer.checkpoint.shards.shard_source import ShardSource
    from ds_trainer.engine.state.state_shards import MASTER
    from ds_trainer.training.loop.data_cursor import DataCursor

    fill, scalars = ShardSource.fill, ShardSource.scalars

    def without(left_out: str) -> Any:
        def some(self: Any, name: str, kind: str, shard_slice: Any, target: torch.Tensor) -> None:
            if kind != left_out:
                fill(self, name, kind, shard_slice, target)

        return some

    def first_step(self: Any, name: str) -> dict[str, Any]:
        return {key: torch.ones_like(value) for key, value in scalars(self, name).items()}

    return {
        "weights": (ShardSource, "fill", without(MASTER)),
        "first moment": (ShardSource, "fill", without("exp_avg")),
        "second moment": (ShardSource, "fill", without("exp_avg_sq")),
        "step of the optimizer": (ShardSource, "scalars", first_step),
        "settings and counters": (engine_files, "write_client_state", lambda engine, progress, keep: None),
        "schedule": (torch.optim.lr_scheduler.LambdaLR, "load_state_dict", lambda self, state: None),
        "random state": (manager, "restore_random_state", lambda state: None),
        "place in the epoch": (DataCursor, "_enter_at", lambda self, at: None),
        "trainer's state": (TrainerState, "load_from_json", lambda path: TrainerState()),
    }[piece]


def run_without(piece: str | None, output_dir: str, checkpoint: str) -> Any:
    if piece is None:
        return run(output_dir, checkpoint, data="augmented", seed=1)
    owner, name, replacement = without_restoring(piece)
    kept = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        return run(output_dir, checkpoint, data="augmented", seed=1)
    finally:
        setattr(owner, name, kept)


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A run that was never stopped, and its checkpoint in the middle."""
    directory = tmp_path_factory.mktemp("whole")
    return pool(1).run(partial(run, str(directory), data="augmented"))[0], str(directory / "checkpoint-4")


PIECES = (
    *("weights", "first moment", "second moment", "step of the optimizer", "settings and counters", "schedule"),
    *("random state", "place in the epoch", "trainer's state"),
)


@pytest.mark.cases(4)
@pytest.mark.parametrize("piece", [None, *PIECES])
def test_control_every_piece_of_saved_state_is_needed(
    piece: str | None, uninterrupted_run: tuple[Any, str], tmp_path: Path
) -> None:
    wanted, checkpoint = uninterrupted_run
    (found,) = pool(1).run(run_without, piece, str(tmp_path), checkpoint)
    assert (differences(found, wanted) == []) is (piece is None)


# -- loaders that are not the Trainer's ------------------------------------------------------------------------------


class OwnLoader(Trainer):
    """A loader that shuffles with the global generator, as torch's does."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(Tokens(), batch_size=4, shuffle=True, collate_fn=stack)


class StatefulLoader:
    """A stateful loader, by the protocol of torchdata."""

    loaded = False

    def __init__(self) -> None:
        self.rows, self.place, self.order, self.read = Tokens().rows, 0, list[int](), 0

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.place, self.order = 0, torch.randperm(len(self.rows)).tolist()
        self.loaded = False
        while self.place < 9:
            start = 4 * self.place
            self.place += 1
            self.read += 1
            yield stack([self.rows[index] for index in self.order[start : start + 4]])

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.order, self.loaded = state["place"], list(state["order"]), True


class OwnStatefulLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        self.own_loader = StatefulLoader()
        return self.own_loader


class GlobalStream(AugmentedStream):
    """Draws its order, and a part of its content, from the global generators."""

    def __iter__(self) -> Iterator[Any]:
        self.generator.manual_seed(int(torch.randint(1000, ())))
        return super().__iter__()


class OwnStreamLoader(Trainer):
    """A plain loader over a stream of unknown length."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(GlobalStream(), batch_size=4, collate_fn=stack)


def run_with_loader(kind: type[Trainer], output_dir: str, resume: Any, stop_at: int | None, seed: int) -> Any:
    trainer = make(output_dir, trainer_class=kind, stop_at=stop_at, seed=seed, max_steps=14, save_steps=stop_at or 14)
    batches = record_batches(trainer)
    trainer.train(resume_from_checkpoint=resume)
    read = trainer.own_loader.read if isinstance(trainer, OwnStatefulLoader) else None
    return run_record(trainer, batches), read


@pytest.mark.cases(1)
@pytest.mark.parametrize("stop", [4, 9, 11])
@pytest.mark.parametrize("kind", [OwnLoader, OwnStatefulLoader, OwnStreamLoader])
def test_custom_loaders_resume(kind: type[Trainer], stop: int, tmp_path: Path) -> None:
    ((wanted, _),) = pool(1).run(run_with_loader, kind, str(tmp_path / "whole"), None, None, 0)
    pool(1).run(run_with_loader, kind, str(tmp_path / "parts"), None, stop, 0)
    ((found, read),) = pool(1).run(run_with_loader, kind, str(tmp_path / "parts"), True, None, 1)
    assert differences(found, wanted) == []
    if kind is OwnStatefulLoader:
        assert read == 14 - stop  # nothing was read over


def test_a_custom_loader_cannot_resume_inside_a_batch(tmp_path: Path) -> None:
    pool(1).run(run_with_loader, OwnLoader, str(tmp_path), None, 3, 0)
    (message,) = pool(1).run(refused_batch, str(tmp_path))
    assert "12 samples of epoch 0" in message and "between two batches only" in message


def refused_batch(output_dir: str) -> str:
    changed = {"per_device_train_batch_size": 5, "max_steps": 14}
    trainer = make(output_dir, trainer_class=OwnLoader, **changed)
    try:
        trainer.train(resume_from_checkpoint=True)
    except ConfigError as error:
        return str(error)
    raise AssertionError("was not refused")


# -- what ends with the run -------------------------------------------------------------------------------------------


def run_finished(output_dir: str, resume: bool) -> tuple[int, int]:
    trainer = make(output_dir, max_steps=7, save_steps=7)
    batches = record_batches(trainer)
    trainer.train(resume_from_checkpoint=resume)
    step = trainer.state.global_step
    trainer.engine.close()
    return step, len(batches)


def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
    """In the middle of an epoch too."""
    assert pool(1).run(run_finished, str(tmp_path), False) == [(7, 7)]
    assert pool(1).run(run_finished, str(tmp_path), True) == [(7, 0)]


# -- a clock that is set ---------------------------------------------------------------------------------------------

SET_CLOCK: dict[str, Any] = {"save_steps": 2, "save_total_limit": 2, "hang_timeout": 600.0, "hang_policy": "abort"}


class SetClock(TrainerCallback):
    """Between two checkpoints of a run."""

    def __init__(self, jump: float) -> None:
        self.real, self.jump, self.steps = time.time, jump, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps = state.global_step

    def now(self) -> float:
        return self.real() + (self.jump if self.steps in (3, 4, 7) else 0.0)


def run_with_a_clock(jump: float, *args: Any, **more: Any) -> Any:
    clock = SetClock(jump)
    with mock.patch.object(time, "time", clock.now):
        return run(*args, callbacks=[clock], **more)


@pytest.mark.parametrize("jump", [-3600.0, 86_400.0], ids=["an hour back", "a day forward"])
def test_a_clock_that_is_set_changes_nothing(jump: float, tmp_path: Path) -> None:
    """Neither which checkpoints are kept, nor where a run goes on, nor what counts as a hang."""
    whole = pool(2).run(partial(run, str(tmp_path / "whole"), **SET_CLOCK))
    pool(2).run(partial(run_with_a_clock, jump, str(tmp_path / "run"), stop_at=6, **SET_CLOCK))
    kept = list_checkpoints(tmp_path / "run")
    assert [path.name for path in kept] == ["checkpoint-4", "checkpoint-6"]
    for path in (kept[1], *kept[1].iterdir()):  # as its file system saw it, if it has the same clock
        os.utime(path, (time.time() + jump,) * 2)
    resumed = pool(2).run(partial(run_with_a_clock, -jump, str(tmp_path / "run"), auto_resume=True, **SET_CLOCK))
    for wanted, found in zip(whole, resumed, strict=True):
        assert differences(found, wanted, 2) == []
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-6", "checkpoint-8"]

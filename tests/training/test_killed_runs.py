"""Real trainings whose ranks are killed, at chosen operations of a save and at any moment; the next run is exact.

Exact is what it is in ``test_exact_resume.py``: batches, losses, gradient norms, learning rates, random states, weights
and every tensor of the optimizer, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ds_trainer import TrainerCallback
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.checkpoint.protocol.manifest import DEEPSPEED, Manifest
from ds_trainer.training.resume.checkpointer import Checkpointer
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from tests.support import diverging
from tests.support.pool import RankFailure, pool
from tests.support.resuming import RunRecord, differences, make, run
from tests.training.resume.test_resumption import STOP_AT, make_trainer

STEPS = 8
SAVING: dict[str, Any] = {"save_steps": 2, "zero_stage": 1}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(TrainerCallback):
    """From step 4 on: the process ends before the ``count``-th call of an operation on files."""

    def __init__(self, operation: str, count: int) -> None:
        self.operation, self.count = operation, count

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            original = getattr(disk, self.operation)

            def operation(*arguments: Any) -> Any:
                self.count -= 1
                if self.count == 0:
                    _die()
                return original(*arguments)

            setattr(disk, self.operation, operation)


class DieLater(TrainerCallback):
    """After the first checkpoint: the process ends some time later, whatever it does then."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        time.sleep(self.seconds)
        _die()


def killed(
    output_dir: str, ranks: tuple[int, ...], callback: Callable[[], TrainerCallback], in_background: bool
) -> None:
    trainer = make(output_dir, **SAVING, save_async=in_background)
    if distributed.rank() in ranks:
        trainer.add_callback(callback())
    trainer.train()
    if distributed.rank() in ranks:
        time.sleep(60)  # to be killed later


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    return list(pool(2).run(partial(run, str(tmp_path_factory.mktemp("whole")), **SAVING)))


def resume_and_compare(output_dir: Path, uninterrupted: list[RunRecord]) -> None:
    """The resumed run ends as the unbroken one, and nothing half done is left."""
    # A run may be killed when it has trained all its steps: then the next one has none to do.
    remaining = STEPS - Manifest.read(list_checkpoints(output_dir)[-1]).step
    resumed = pool(2).run(partial(run, str(output_dir), True, **SAVING))
    for wanted, found in zip(uninterrupted, resumed, strict=True):
        assert len(found.batches) == remaining
        assert differences(found, wanted, remaining) == []
    assert [path.name for path in list_checkpoints(output_dir)][-1] == f"checkpoint-{STEPS}"
    assert not list(output_dir.glob(".*"))


KILLS = {
    "rank 1 while it writes": ((1,), ("write", 2), "checkpoint-2"),
    "rank 0 before its files are on the disk": ((0,), ("flush", 1), "checkpoint-2"),
    "rank 0 before the checkpoint has its name": ((0,), ("rename", 1), "checkpoint-2"),
    "rank 0 before the pointer is changed": ((0,), ("rename", 2), "checkpoint-4"),
    "both while they write": ((0, 1), ("write", 3), "checkpoint-2"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", KILLS)
def test_a_run_killed_during_a_save_resumes(name: str, uninterrupted: list[RunRecord], tmp_path: Path) -> None:
    ranks, (operation, count), newest = KILLS[name]
    with pytest.raises(RankFailure):
        pool(2).run(killed, str(tmp_path), ranks, partial(DieAt, operation, count), False, timeout=60)
    assert [path.name for path in list_checkpoints(tmp_path)][-1] == newest
    resume_and_compare(tmp_path, uninterrupted)


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_any_moment_resumes(seed: int, uninterrupted: list[RunRecord], tmp_path: Path) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([(0,), (1,), (0, 1)])
    with pytest.raises(RankFailure):
        later = partial(DieLater, chance.uniform(0.0, 0.5))
        pool(2).run(killed, str(tmp_path), ranks, later, seed % 2 == 0, timeout=60)
    assert list_checkpoints(tmp_path)
    resume_and_compare(tmp_path, uninterrupted)


# -- a rollback ------------------------------------------------------------------------------------------------------

BACK: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "nonfinite_policy": "rollback"}


def roll_back(output_dir: str, seconds: float | None = None) -> tuple[RunRecord, dict[str, Any]]:
    """Step 7 of a training goes wrong, after a checkpoint of step 4; ``seconds`` after the rollback begins: SIGKILL."""
    original = Checkpointer.roll_back

    def killed_later(checkpointer: Checkpointer, reason: str) -> Any:
        if seconds is not None:
            threading.Thread(target=lambda: time.sleep(seconds) or _die(), daemon=True).start()
        return original(checkpointer, reason)

    with mock.patch.object(Checkpointer, "roll_back", killed_later):
        found = diverging.run(output_dir, diverging.Rows(12, 8, bad=(6,)), auto_resume=True, zero_stage=1, **BACK)
        time.sleep(0.0 if seconds is None else 60.0)
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.06, 0.12, 0.25])
def test_a_run_killed_during_a_rollback_resumes(seconds: float, tmp_path: Path) -> None:
    """It goes wrong at the same step again, or has the checkpoint that follows: the end is that of the unbroken run."""
    whole = pool(2).run(roll_back, str(tmp_path / "whole"))
    with pytest.raises(RankFailure):
        pool(2).run(roll_back, str(tmp_path / "killed"), seconds, timeout=60)
    for (found, counted), (wanted, wanted_counts) in zip(
        pool(2).run(roll_back, str(tmp_path / "killed")), whole, strict=True
    ):
        assert (found.logs, found.state, found.random, found.step) == (wanted.logs, wanted.state, wanted.random, 8)
        assert {**counted, "history": 0} == {**wanted_counts, "history": 0} and counted["rollbacks"] == 1
    assert not list((tmp_path / "killed").glob(".*"))


# -- two jobs in one directory ---------------------------------------------------------------------------------------


class WaitInTheMiddle(TrainerCallback):
    """At step 3: writes a file, and continues when another one exists."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir).parent
        if state.global_step == 3:
            (folder / "waiting").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)


def refused(output_dir: str) -> str:
    with pytest.raises(ConfigError) as error:
        run(output_dir, True, **SAVING)
    return str(error.value)


def test_a_second_job_is_rejected_without_harm(uninterrupted: list[RunRecord], tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(pool(2).run, partial(run, str(output_dir), callbacks=[WaitInTheMiddle()], **SAVING))
        try:
            while not ((tmp_path / "waiting").exists() and list_checkpoints(output_dir)):  # saved in the background
                assert not first.done()
                time.sleep(0.05)
            (message,) = pool(1).run(refused, str(output_dir))
        finally:
            (tmp_path / "go").touch()
        for wanted, found in zip(uninterrupted, first.result(), strict=True):
            assert differences(found, wanted) == []
    assert str(output_dir) in message and "process" in message
    assert [path.name for path in list_checkpoints(output_dir)][-1] == "checkpoint-8"
    assert not list(output_dir.glob(".*"))


# -- an optimizer whose state only DeepSpeed knows -------------------------------------------------------------------


class Disguise(TrainerCallback):
    """Makes DeepSpeed's optimizer one of a class that is not known here, as ZenFlow's and SuperOffload's are."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrapper = kwargs["model"]._ds_optimizer_for_test
        wrapper.__class__ = type("Unknown", (type(wrapper),), {})


def run_disguised(output_dir: str, stop_at: int | None, resume: bool, stage: int) -> tuple[list[float], str]:
    samples = 8 // distributed.world_size()  # the same global batch everywhere
    trainer = make_trainer(output_dir, stop_at, zero_stage=stage, per_device_train_batch_size=samples)
    build = trainer._ds_trainer.build_engine

    def built(steps: int) -> None:
        build(steps)
        trainer.model._ds_optimizer_for_test = trainer.engine.deepspeed.optimizer  # type: ignore[assignment]

    trainer._ds_trainer.build_engine = built  # type: ignore[method-assign]
    trainer.add_callback(Disguise())
    message = ""
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ConfigError as error:
        message = str(error)
    trainer.model.__dict__.pop("_ds_optimizer_for_test", None)
    if trainer._ds_trainer.engines.training_or_none is not None:
        trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], message


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_an_unknown_optimizer_are_saved_by_deepspeed(stage: int, tmp_path: Path) -> None:
    ((wanted, _), _) = pool(2).run(run_disguised, str(tmp_path / "whole"), None, False, stage)
    pool(2).run(run_disguised, str(tmp_path / "parts"), STOP_AT, False, stage)
    manifest = Manifest.read(tmp_path / "parts" / f"checkpoint-{STOP_AT}")
    assert manifest.engine == DEEPSPEED
    assert sum(name.startswith("engine/") for name in manifest.files) >= 3
    assert "model.safetensors" in manifest.files  # the weights are gathered, while training waits
    ((found, _), _) = pool(2).run(run_disguised, str(tmp_path / "parts"), None, True, stage)
    assert found == wanted
    ((_, message),) = pool(1).run(run_disguised, str(tmp_path / "parts"), None, True, stage)
    assert "can be resumed only in its own layout" in message and "'world_size': 2" in message


# -- a disk in every machine -----------------------------------------------------------------------------------------


def run_on_own_disk(root: str, stop_at: int | None, resume: bool) -> list[float]:
    """Every rank is a machine of its own, with its own output directory."""
    import socket

    rank, kept = distributed.rank(), socket.gethostname
    socket.gethostname = lambda: f"machine-{rank}"
    try:
        trainer = make_trainer(f"{root}/{rank}", stop_at, save_on_each_node=True, **SAVING)
        trainer.train(resume_from_checkpoint=resume)
        trainer.engine.close()
    finally:
        socket.gethostname = kept
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_every_machine_saves_the_shards_of_its_ranks(tmp_path: Path) -> None:
    wanted = pool(2).run(run_on_own_disk, str(tmp_path / "whole"), None, False)[0]
    pool(2).run(run_on_own_disk, str(tmp_path), STOP_AT, False)
    for rank in (0, 1):
        manifest = Manifest.read(tmp_path / str(rank) / f"checkpoint-{STOP_AT}")
        assert (manifest.node, manifest.nodes) == (rank, 2)
        assert {"trainer_state.json", "progress.pt", f"rank_{rank:05d}.safetensors"} <= set(manifest.files)
        assert f"rank_{1 - rank:05d}.safetensors" not in manifest.files
        assert not any(name.startswith("model") for name in manifest.files if name != "model.json")
    for losses in pool(2).run(run_on_own_disk, str(tmp_path), None, True):
        assert losses == wanted

"""Policies do what their pages say when the disk is really full, from step 5 on: a small file system that is filled."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.checkpoint.protocol.checkpoint_save import SaveFailed
from ds_trainer.monitor.health.divergence import TrainingDiverged
from ds_trainer.training.stopping.stop_controller import TrainingStopped
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import HUNG, REQUEUE
from tests.checkpoint.protocol.test_save_failures import small_disk
from tests.monitor.health import hung_runs
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import RankFailure, pool

FULL_AT, STEPS, BAD = 5, 12, 9  # BAD: the step whose loss is NaN


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


class Fill(TrainerCallback):
    """Fills the disk at the end of a step; ``freed_at`` makes room again, ``signal_at`` asks for a stop."""

    def __init__(self, disk: Path, full_at: int = FULL_AT, freed_at: int = 0, signal_at: int = 0) -> None:
        self._file, self._full_at, self._freed_at, self._signal_at = disk / "filler", full_at, freed_at, signal_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._full_at and state.is_world_process_zero:
            fill(self._file)
        if state.global_step == self._freed_at:
            self._file.unlink()
        if state.global_step == self._signal_at:
            os.kill(os.getpid(), signal.SIGTERM)


def fill(path: Path) -> None:
    try:
        while os.statvfs(path.parent).f_favail < 1000:  # the disk may have few files, and much space
            path.with_name(f"{path.name}-{os.statvfs(path.parent).f_favail}").touch(exist_ok=False)
        with path.open("ab", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
    except OSError:
        return


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage() + ("" if record.exc_info is None else "\nTraceback"))


def trained(disk: str, freed_at: int, signal_at: int = 0, **arguments: Any) -> tuple[str, int, bool, list[str]]:
    """How it ended, at which step, whether the weights are finite, and what was logged."""
    torch.manual_seed(0)
    samples = [{"x": torch.randn(64), "labels": torch.tensor(1.0)} for _ in range(STEPS * 4)]
    samples[(BAD - 1) * 4]["x"][0] = float("nan") if "nonfinite_policy" in arguments else 0.0
    values: dict[str, Any] = {"max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "save_async": False}
    args = TrainingArguments(
        f"{disk}/out",
        **{**values, **arguments},
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        save_total_limit=2,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    messages = Messages()
    logging.getLogger("ds_trainer").addHandler(messages)
    try:
        full = Fill(Path(disk), FULL_AT, freed_at, signal_at)
        trainer = Trainer(Regression(), args, train_dataset=samples, callbacks=[full])
        trainer.train()
        ending = ""
    except (SaveFailed, TrainingDiverged, ConfigError, TrainingStopped) as error:
        ending = f"{type(error).__name__} {getattr(error, 'code', '')}: {error}".replace(" :", ":")
    finally:
        logging.getLogger("ds_trainer").removeHandler(messages)
    finite = all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
    step = trainer.state.global_step
    if trainer._ds_trainer.engines.training_or_none is not None:
        trainer.engine.close()
    del trainer
    return ending, step, finite, messages.texts


CONTINUE = {"save_failure_policy": "continue"}


@pytest.mark.parametrize(
    ("freed_at", "arguments", "ending", "steps"),
    [
        (0, CONTINUE, "", STEPS),
        (0, {**CONTINUE, "save_async": True}, "", STEPS),
        (7, CONTINUE, "", STEPS),
        (0, {}, "SaveFailed: checkpoint-6 could not be written", 6),
        (0, {"save_strategy": "no"}, "", STEPS),
        (-1, CONTINUE, "", STEPS),
        (-1, {}, "SaveFailed: checkpoint-6 could not be written", 6),
        (0, {**CONTINUE, "nonfinite_policy": "skip"}, "", STEPS),
        (0, {**CONTINUE, "nonfinite_policy": "stop"}, "TrainingDiverged: Step 9: the loss is not finite", BAD - 1),
        (0, {**CONTINUE, "nonfinite_policy": "rollback"}, "", STEPS),
    ],
)
def test_a_policy_holds_on_a_full_disk(
    freed_at: int, arguments: dict[str, Any], ending: str, steps: int, tmp_path: Path
) -> None:
    """``freed_at``: -1 if there is space, but the disk can have no more files."""
    with small_disk(tmp_path / "disk", "8m,nr_inodes=100" if freed_at < 0 else "1m") as disk:
        run = partial(trained, str(disk), freed_at, **arguments)
        ((found, step, finite, messages),) = pool(1).run(run)
        assert found.startswith(ending) and bool(found) == bool(ending), found
        assert step == steps and finite
        kept = [path.name for path in list_checkpoints(disk / "out")]
        if freed_at > 0:
            assert kept == ["checkpoint-10", "checkpoint-12"]
            assert (disk / "out" / "trainer_state.json").is_file() and (disk / "out" / "report.html").is_file()
        elif arguments.get("save_strategy") != "no":
            # Step 4 may still be written in the background when the disk fills.
            assert kept in (["checkpoint-2", "checkpoint-4"], ["checkpoint-2"][: arguments.get("save_async", False)])
        assert not [text for text in messages if text.endswith("Traceback")]
        text = "\n".join(messages)
        if freed_at == 0 and not (ending or arguments.get("save_async")):  # an abandoned save may leave some room
            assert "trainer_state.json was not written" in text and "The report of the run was not written" in text
        if "nonfinite_policy" in arguments:
            assert "cannot be saved" in text and "replay runs them again" not in text + found
            assert not list((disk / "out").glob("divergence/*/*.pt"))


def test_a_start_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        assert pool(1).run(partial(trained, str(disk), FULL_AT, max_steps=6))[0][:2] == ("", 6)
        fill(disk / "filler")
        ((found, *_),) = pool(1).run(partial(trained, str(disk), 0, auto_resume=True))
        assert found.startswith("ConfigError") and "No space left on device" in found
        assert [path.name for path in list_checkpoints(disk / "out")] == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize(
    ("policy", "ending"),
    [
        ("continue", f"TrainingStopped {REQUEUE}: Stopped at step {{}} by SIGTERM on rank 0: {{}}/out/checkpoint-4 is"),
        ("stop", "SaveFailed: checkpoint-{} could not be written to {}"),
    ],
    ids=["continue", "stop"],
)
def test_a_stop_on_a_full_disk_says_which_checkpoint_is_complete(policy: str, ending: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        values = {"save_steps": 4, "save_failure_policy": policy}
        ((found, step, finite, messages),) = pool(1).run(partial(trained, str(disk), 0, 7, **values))
        assert found.startswith(ending.format(step, disk)) and step in (7, 8, 9) and finite, found
        assert any("The run stops without it" in text for text in messages) == (policy == "continue")
        assert [path.name for path in list_checkpoints(disk / "out")] == ["checkpoint-4"]
        (disk / "filler").unlink()
        again = {"auto_resume": True, "max_steps": 12, **values}
        assert pool(1).run(partial(trained, str(disk), FULL_AT, **again))[0][:2] == ("", 12)


class Told(logging.Handler):
    """Appends messages about a hang to a file on another disk."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if "has stalled" in record.getMessage() or "making progress again" in record.getMessage():
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(record.getMessage())


class Waits(TrainerCallback):
    """Waits after a step for what the watchdog says, for less than its limit."""

    def __init__(self, after: int, done: Callable[[], bool]) -> None:
        self._after, self._done = after, done

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        deadline = time.monotonic() + 1.5
        while state.global_step == self._after and not self._done() and time.monotonic() < deadline:
            time.sleep(0.05)


def hung(disk: str, told: str, policy: str) -> int:
    """A training of two ranks on a full disk, in which rank 1 stands still until the hang has been told."""

    def stands_still() -> None:
        deadline = time.monotonic() + hung_runs.LONGEST
        while policy == "abort" or not (Path(told).exists() or time.monotonic() > deadline):
            time.sleep(0.05)
        time.sleep(1.0)  # the watchdog looks again

    logging.getLogger("ds_trainer").addHandler(Told(Path(told)))
    kind = type("Stopping", (hung_runs.Stops,), {"faulty": 1, "stands_still": staticmethod(stands_still)})
    args = hung_runs.arguments(f"{disk}/out", hang_policy=policy)
    full = Fill(Path(disk), hung_runs.STEP - 1)
    told_again = Waits(
        hung_runs.STEP + 1, lambda: policy == "abort" or "again" in Path(told).read_text(encoding="utf-8")
    )
    trainer = kind(tiny_llama(), args, train_dataset=RaggedTokens(96), callbacks=[full, told_again])
    trainer.train()
    trainer.engine.close()
    return int(trainer.state.global_step)


@pytest.mark.cases(1)
@pytest.mark.parametrize("policy", ["report", "abort"])
def test_a_hang_on_a_full_disk_is_in_the_log(policy: str, tmp_path: Path) -> None:
    ranks, told = pool(2), tmp_path / "told"
    workers = list(ranks._workers)
    with small_disk(tmp_path / "disk", "1m") as disk:
        if policy == "report":
            assert ranks.run(hung, str(disk), str(told), policy) == [6, 6]
        else:
            with pytest.raises(RankFailure):
                ranks.run(hung, str(disk), str(told), policy, timeout=60.0)
            assert [worker.exitcode for worker in workers] == [HUNG, HUNG]
        text = told.read_text(encoding="utf-8")
        assert "Slow: rank 1 (" in text and text.count("has stalled") == 1
        assert text.count("making progress again") == (policy == "report")
        assert not list((disk / "out").glob("health/hang-*/report.txt"))

"""Sentences of the pages on stopping, hangs, saving and divergence that no other test holds.

tests/docs/policies.txt has the test of every sentence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_trainer import TrainerCallback
from ds_trainer.monitor.health import run_health
from ds_trainer.monitor.health.divergence import TrainingDiverged
from ds_trainer.monitor.health.heartbeat import Limit
from ds_trainer.monitor.health.run_health import HealthSettings, RunHealth
from ds_trainer.monitor.health.watchdog import WatchdogRules
from ds_trainer.training.resume import background_saves, output_directory
from ds_trainer.training.stopping import job_end, signals, stop_controller
from ds_trainer.training.stopping.job_end import JobEnd
from ds_trainer.training.stopping.signals import SignalCounter
from ds_trainer.training.stopping.stop_controller import StopController
from ds_trainer.utils import distributed
from ds_trainer.utils.exit_codes import FAILED, STOPPED, code_of
from tests.checkpoint.protocol.test_directory_lock import held_by_another
from tests.support.diverging import Rows, divergence_error, make, run, run_in_fp16
from tests.support.pool import pool
from tests.training.resume.test_resumption import make_trainer
from tests.training.stopping.test_stopping import stopped_by_file

SIZE = 8


def test_documented_numbers() -> None:
    rules = WatchdogRules.of(Limit(60.0, 5.0, 0.0), False, lambda: None)
    assert (rules.poll, rules.answer, rules.on_abort_seconds) == (3.0, 11.0, 60.0)
    extremes = [WatchdogRules.of(Limit(seconds, 5.0, 0.0), False, lambda: None).poll for seconds in (0.5, 600.0)]
    assert extremes == [0.1, 5.0]
    assert (signals.BURST_SECONDS, stop_controller.SECONDS_BETWEEN, job_end.POLL_SECONDS) == (1.0, 0.25, 300.0)
    assert (background_saves.AFTER_SIGTERM_SECONDS, background_saves.AFTER_FAILURE_SECONDS) == (60.0, 8.0)
    assert output_directory._EXITING_SECONDS == 120.0


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_own_handlers_are_kept() -> None:
    before = signal.signal(signal.SIGUSR1, own := lambda number, frame: None)
    try:
        others = signal.getsignal(signal.SIGTERM)
        with SignalCounter():
            assert signal.getsignal(signal.SIGUSR1) is own
            assert signal.getsignal(signal.SIGTERM) is not others
        assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)) == (own, others)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_outside_of_the_main_thread_no_handlers_are_installed() -> None:
    def inside() -> Any:
        with SignalCounter():
            return [signal.getsignal(number) for number in signals.SIGNALS]

    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(inside).result() == before


class Handlers(TrainerCallback):
    """Whether SIGTERM ends the process during the training, at most after a save that a callback has begun."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.default = signal.getsignal(signal.SIGTERM) is not signals._nothing


def has_default_effect(output_dir: str, arguments: dict[str, Any]) -> bool:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    callback = Handlers()
    trainer = make_trainer(output_dir, max_steps=2, **arguments)
    trainer.add_callback(callback)
    trainer.train()
    trainer.engine.close()
    signal.signal(signal.SIGTERM, before)
    return callback.default


@pytest.mark.parametrize(
    ("arguments", "default"),
    [
        ({"save_strategy": "no"}, True),
        ({"save_only_model": True}, True),
        ({"save_strategy": "no", "enable_jit_checkpoint": True}, False),
        ({}, False),
    ],
    ids=str,
)
def test_signals_have_their_default_effect_without_checkpoints(
    arguments: dict[str, Any], default: bool, tmp_path: Path
) -> None:
    assert pool(1).run(has_default_effect, str(tmp_path), arguments) == [default]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_stop_file_ends_a_run_that_saves_nothing(kind: str, tmp_path: Path) -> None:
    """Also one that cannot be removed afterwards: a warning says so."""
    name = tmp_path / "out" / "STOP"
    if kind == "directory":
        name.mkdir(parents=True)
    run_once = partial(stopped_by_file, str(tmp_path / "out"), str(name / "x" if kind == "directory" else name), False)
    for code, step, reason in pool(2).run(partial(run_once, save_strategy="no")):
        assert (code, reason) == (STOPPED, "the stop file") and (step == 0) == (kind == "directory")
    assert name.exists() == (kind == "directory")


def test_the_time_that_a_stop_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_TRAINER_JOB_END", str(time.time() + 1000.0))
    stopper = StopController(tmp_path, True, True, 60.0, None)
    stopper._durations.extend([1.0, 4.0, 2.0])
    assert stopper._needed() == 3 * 4.0 + 1.5 * 30.0 + 60.0
    stopper.note_save(8.0)
    stopper.note_save(6.0)
    assert stopper._needed() == 3 * 4.0 + 1.5 * 8.0 + 60.0


def test_squeue_says_when_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again later: limits may be extended."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\ncat {tmp_path}/answer\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(job_end, "POLL_SECONDS", 0.05)
    found = []
    for answer in ("2026-11-27T10:00:00", "UNLIMITED"):
        (tmp_path / "answer").write_text(f"{answer}\n")
        end = JobEnd({"SLURM_JOB_ID": "7"})
        deadline = time.monotonic() + 20
        while (tmp_path / "asked").read_text().count("\n") < 3 if (tmp_path / "asked").exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        end.close()
        found.append(end.at)
        (tmp_path / "asked").unlink()
    assert found == [time.mktime(time.strptime("2026-11-27T10:00:00", "%Y-%m-%dT%H:%M:%S")), None]


# -- auto_resume -------------------------------------------------------------------------------------------------------


def resumed(output_dir: str, release: int) -> int:
    """Train automatically, while another process holds the directory that ends two seconds later."""
    threading.Timer(2.0, os.kill, (release, signal.SIGKILL)).start()
    trainer = make_trainer(output_dir, auto_resume=True, max_steps=2)
    trainer.train()
    trainer.engine.close()
    return int(trainer.state.global_step)


def test_a_resumed_run_waits_for_the_processes_of_the_previous_one(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as process:
        began = time.monotonic()
        assert pool(1).run(resumed, str(tmp_path), process) == [2]
        assert time.monotonic() - began > 2.0


# -- hangs -------------------------------------------------------------------------------------------------------------


def aborts(several_machines: bool, policy: bool | None) -> bool:
    own = f"machine-{distributed.rank()}" if several_machines else "machine"
    settings = HealthSettings(300.0, 20.0, 1800.0, policy, 0)
    with (
        mock.patch.object(run_health, "host_name", lambda: own),
        RunHealth(settings, Path("/nowhere"), 0, lambda: None) as health,
    ):
        assert health._watchdog is not None
        return health._watchdog.rules.abort


@pytest.mark.parametrize(
    ("several", "policy", "expected"), [(True, None, True), (False, None, False), (True, False, False)]
)
def test_hang_policy_auto_aborts_on_several_machines(several: bool, policy: bool | None, expected: bool) -> None:
    assert pool(2).run(aborts, several, policy) == [expected, expected]


def test_the_flight_recorder_of_gloo_can_be_turned_on() -> None:
    program = """
import torch, torch.distributed as dist
from ds_trainer.monitor.health.waits import flight_record
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(len(flight_record()))"""
    counts = []
    for size in ("0", "200"):
        environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": size}
        command = [sys.executable, "-c", program]
        counts.append(int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout))
    assert counts[0] == 0 < counts[1]


# -- saving ------------------------------------------------------------------------------------------------------------


def files_of_a_run(first: str, then: str) -> list[str]:
    """A Trainer is made in one directory and trains in another one."""
    here = os.getcwd()
    try:
        os.chdir(first)
        trainer = make_trainer("out", max_steps=2, save_steps=2)
        os.chdir(then)
        trainer.train()
        trainer.engine.close()
    finally:
        os.chdir(here)
    return sorted(os.listdir(then))


def test_a_relative_directory_is_that_of_the_constructor(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert pool(1).run(files_of_a_run, str(tmp_path / "a"), str(tmp_path / "b")) == [[]]
    assert (tmp_path / "a" / "out" / "checkpoint-2").is_dir()


# -- divergence --------------------------------------------------------------------------------------------------------


def test_a_limit_of_0_stops_at_the_first_incident(tmp_path: Path) -> None:
    (error,) = pool(1).run(partial(divergence_error, str(tmp_path), Rows(6, SIZE, bad=(1,)), divergence_limit=0))
    assert "Step 2" in error and "divergence_limit=0" in error
    assert code_of(TrainingDiverged(error)) == FAILED


def test_the_first_ten_incidents_are_kept(tmp_path: Path) -> None:
    data = Rows(14, SIZE, bad=tuple(range(1, 13)))
    more = {"max_steps": 14, "divergence_limit": 20}
    ((record, counted),) = pool(1).run(partial(run, str(tmp_path), data, **more))
    assert (record.step, counted["skipped"]) == (14, 12)
    kept = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "divergence").iterdir())
    assert kept == list(range(2, 12))
    saved = torch.load(next((tmp_path / "divergence" / "step-2").iterdir()), weights_only=True)
    assert {"batches", "samples", "losses", "random", "step", "seed", "layout"} <= set(saved)


def test_with_epochs_a_rollback_ends_with_fewer_steps(tmp_path: Path) -> None:
    more = {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 4}
    data = Rows(8, SIZE, bad=(5,))
    ((record, counted),) = pool(1).run(partial(run, str(tmp_path), data, nonfinite_policy="rollback", **more))
    assert (record.step, counted["rollbacks"], counted["tried"]) == (6, 1, 8)


def test_a_lasting_rise_ends_the_run(tmp_path: Path) -> None:
    more = {"max_steps": 14, "loss_spike_factor": 2.0, "loss_spike_window": 8}
    data = Rows(14, SIZE, bad=tuple(range(6, 14)))
    (error,) = pool(1).run(partial(divergence_error, str(tmp_path), data, "9.0", **more))
    assert "Step 10: the loss is" in error and "incident 4 in 1000 steps (divergence_limit=3)" in error


class Overflow(TrainerCallback):
    """A weight becomes infinite after step 5, once, as in an update that overflows."""

    done = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and not self.done:
            self.done = True
            with torch.no_grad():
                next(kwargs["model"].parameters()).fill_(torch.inf)


def overflowed(output_dir: str, policy: str) -> tuple[str, int]:
    more = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "nonfinite_policy": policy}
    trainer = make(output_dir, Rows(14, SIZE), callbacks=[Overflow()], divergence_limit=2, **more)
    try:
        trainer.train()
        error = ""
    except TrainingDiverged as raised:
        error = str(raised)
    trainer.engine.close()
    return error, int(trainer.state.global_step)


def test_a_weight_that_overflowed_is_seen_a_step_later(tmp_path: Path) -> None:
    """``skip`` and ``stop`` cannot repair it; ``rollback`` does."""
    ((error, step),) = pool(1).run(overflowed, str(tmp_path / "stop"), "stop")
    assert "Step 6: the loss is not finite" in error and step == 5
    ((error, _),) = pool(1).run(overflowed, str(tmp_path / "skip"), "skip")
    assert "incident 3 in 1000 steps (divergence_limit=2)" in error
    assert pool(1).run(overflowed, str(tmp_path / "rollback"), "rollback") == [("", 8)]


def smallest_scale(output_dir: str) -> str:
    data = Rows(6, SIZE, bad=tuple(range(6)))
    try:
        run_in_fp16(output_dir, data, "gradient", scale_power=0, zero_stage=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_at_the_smallest_loss_scale_deepspeed_ends_the_training(tmp_path: Path) -> None:
    ((message),) = pool(1).run(smallest_scale, str(tmp_path))
    assert "loss scale already at minimum" in message

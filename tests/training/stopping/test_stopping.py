"""Trainings that are asked to stop: all ranks end at the same checkpoint, and the resumed run is exact.

Exact is what it is in ``test_exact_resume.py``: batches, losses, gradient norms, learning rates, random states, weights
and every tensor of the optimizer, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.checkpoint.protocol.checkpoint_directory import HOW_TO_RESUME, list_checkpoints
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.training.stopping import stop_controller
from ds_trainer.training.stopping.stop_controller import JOB_STOP_FILE, TrainingStopped
from ds_trainer.utils import distributed
from ds_trainer.utils.host_votes import GroupVotes
from tests.support.pool import pool
from tests.support.resuming import RunRecord, differences, make, record_batches, run, run_record
from tests.support.stop_requests import ActAtStep, send

STEPS = 8


def stopped(output_dir: str, at: int, action: Callable[[], None], rank: int = 1, **more: Any) -> tuple[Any, ...]:
    """Train until a stop is requested; returns the exit code, step, reason, callback events and the record."""
    stop_controller.SECONDS_BETWEEN = 0.0  # steps are too quick to wait for some of them
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
    callback = ActAtStep(at, action, rank)
    trainer = make(output_dir, callbacks=[callback], **more)
    batches = record_batches(trainer)
    try:
        trainer.train()
    except TrainingStopped as stop:
        return stop.code, stop.step, stop.reason, callback.events, run_record(trainer, batches)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop_controller.SECONDS_BETWEEN = 0.25
    return 0, trainer.state.global_step, "", callback.events, run_record(trainer, batches)


_uninterrupted: dict[str, list[RunRecord]] = {}


def unbroken(world: int, tmp_path: Path, **more: Any) -> list[RunRecord]:
    """Records of the uninterrupted run."""
    key = f"{world} {more}"
    if key not in _uninterrupted:
        _uninterrupted[key] = list(pool(world).run(partial(run, str(tmp_path / "whole"), **more)))
    return _uninterrupted[key]


def resume_and_compare(world: int, output_dir: Path, uninterrupted: list[RunRecord], **more: Any) -> list[RunRecord]:
    resumed = list(pool(world).run(partial(run, str(output_dir), None, auto_resume=True, **more)))
    remaining = STEPS - len(resumed[0].batches)
    for wanted, found in zip(uninterrupted, resumed, strict=True):
        assert differences(found, wanted, len(found.batches)) == []
    assert remaining > 0
    return resumed


CASES = [
    (1, "SIGTERM", {"zero_stage": 0}),
    (1, "SIGINT", {"zero_stage": 1}),
    (2, "SIGTERM", {"zero_stage": 1, "save_async": False}),
    (2, "SIGUSR1", {"zero_stage": 3}),
    (2, "SIGINT", {"zero_stage": 2, "bf16": True, "data": "stream"}),
    (4, "SIGUSR1", {"zero_stage": 1, "tensor_parallel_size": 2}),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world", "name", "more"), CASES, ids=str)
def test_a_signal_to_one_rank_stops_all(world: int, name: str, more: dict[str, Any], tmp_path: Path) -> None:
    uninterrupted = unbroken(world, tmp_path, **more)
    output_dir = tmp_path / "out"
    action = partial(send, getattr(signal, name))
    found = pool(world).run(partial(stopped, str(output_dir), 3, action, world - 1, **more))
    steps = {step for _, step, *_ in found}
    assert {code for code, *_ in found} == {75}
    assert {reason for _, _, reason, *_ in found} == {f"{name} on rank {world - 1}"}
    assert steps in ({3}, {4}, {5}), "the step after it, or the one whose vote was under way"
    (step,) = steps
    for _, _, _, events, _ in found:
        assert events == [f"save {step}", "end"]
    assert Manifest.read(list_checkpoints(output_dir)[-1]).step == step
    resumed = resume_and_compare(world, output_dir, uninterrupted, **more)
    assert len(resumed[0].batches) == STEPS - step


def stop_message(output_dir: str, **more: Any) -> str:
    trainer = make(output_dir, callbacks=[ActAtStep(2, partial(send, signal.SIGINT), 0)], **more)
    try:
        trainer.train()
    except TrainingStopped as stop:
        return str(stop)
    finally:
        trainer.engine.close()
    raise AssertionError("was not stopped")


@pytest.mark.parametrize(
    ("more", "ending"),
    [
        ({}, f"To resume, {HOW_TO_RESUME}."),
        ({"auto_resume": True}, "To resume, start the same command again."),
        ({"save_only_model": True, "enable_jit_checkpoint": True}, "no restart requested."),
    ],
    ids=str,
)
def test_the_message_says_what_resumes(more: dict[str, Any], ending: str, tmp_path: Path) -> None:
    (message,) = pool(1).run(partial(stop_message, str(tmp_path), **more))
    assert message.endswith(ending) and "SIGINT on rank 0" in message


@pytest.mark.cases(1)
@pytest.mark.parametrize("world", [1, 2])
def test_a_second_signal_stops_without_a_checkpoint(world: int, tmp_path: Path) -> None:
    twice = partial(send, signal.SIGUSR1, signal.SIGTERM)
    found = pool(world).run(partial(stopped, str(tmp_path), 3, twice, save_steps=2))
    assert {code for code, *_ in found} == {75}
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_run_without_checkpoints_stops(tmp_path: Path) -> None:
    """``enable_jit_checkpoint`` asks for the one when the run is stopped."""
    once = partial(send, signal.SIGTERM)
    more = {"save_strategy": "no", "enable_jit_checkpoint": True}
    ((code, step, *_),) = pool(1).run(partial(stopped, str(tmp_path), 3, once, **more))
    assert (code, [path.name for path in list_checkpoints(tmp_path)]) == (75, [f"checkpoint-{step}"])


def touch(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()


def stopped_by_file(output_dir: str, name: str, from_environment: bool, **more: Any) -> Any:
    os.environ.pop(JOB_STOP_FILE, None)
    if from_environment:
        os.environ[JOB_STOP_FILE] = name
    try:
        return stopped(output_dir, 3, partial(touch, name), 0, **more)[:3]
    finally:
        os.environ.pop(JOB_STOP_FILE, None)


def test_a_stop_file_stops_the_run(tmp_path: Path) -> None:
    name = str(tmp_path / "out" / "STOP")
    found = pool(2).run(stopped_by_file, str(tmp_path / "out"), name, False)
    assert {(code, reason) for code, _, reason in found} == {(77, "the stop file")}
    step = found[0][1]
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == [f"checkpoint-{step}"]
    assert not Path(name).exists(), "obeyed: the next start goes on"


def test_the_stop_file_of_a_job_is_kept(tmp_path: Path) -> None:
    """It stays, so that a launcher which starts the ranks again at once does not get far."""
    name, output_dir = str(tmp_path / "job" / "stop"), str(tmp_path / "out")
    found = pool(2).run(stopped_by_file, output_dir, name, True)
    assert {(code, reason) for code, _, reason in found} == {(75, "the job's stop file")}
    step = found[0][1]
    again = pool(2).run(partial(stopped_by_file, output_dir, name, True, auto_resume=True))
    assert [(code, at) for code, at, _ in again] == [(75, step)] * 2
    assert [path.name for path in list_checkpoints(Path(output_dir))] == [f"checkpoint-{step}"]


def until_job_ends(output_dir: str, seconds: float, **more: Any) -> Any:
    os.environ["DS_TRAINER_JOB_END"] = str(time.time() + seconds)
    try:
        slow = partial(time.sleep, 0.0)
        return stopped(output_dir, 3, slow, **more)[:3]
    finally:
        del os.environ["DS_TRAINER_JOB_END"]


def test_a_run_stops_before_the_time_limit(tmp_path: Path) -> None:
    """The margin is what is left of the job, from the first step on; with a smaller one the run ends by itself."""
    early = pool(2).run(partial(until_job_ends, str(tmp_path / "early"), 500.0, time_limit_margin=600.0))
    assert {(code, step, reason) for code, step, reason in early} == {(75, 0, "the time limit")}
    (late, _) = pool(2).run(partial(until_job_ends, str(tmp_path / "late"), 500.0, time_limit_margin=60.0))
    assert late == (0, STEPS, "")


def test_a_stop_at_the_last_step_is_the_end(tmp_path: Path) -> None:
    ((code, step, _, events, _),) = pool(1).run(partial(stopped, str(tmp_path), STEPS, partial(send, signal.SIGTERM)))
    assert (code, step, events[-1]) == (0, STEPS, "end")


def test_the_same_command_starts_and_resumes(tmp_path: Path) -> None:
    first = pool(1).run(partial(run, str(tmp_path), None, auto_resume=True, stop_at=4))[0]
    second = pool(1).run(partial(run, str(tmp_path), None, auto_resume=True))[0]
    assert (len(first.batches), len(second.batches), second.step) == (4, 4, STEPS)
    once_more = pool(1).run(partial(run, str(tmp_path), None, auto_resume=True))[0]
    assert (once_more.batches, once_more.step) == ([], STEPS)


# -- processes ---------------------------------------------------------------------------------------------------------

SCRIPT = """
    import os, signal, sys, time
    sys.path.insert(0, {root!r})
    from ds_trainer import TrainerCallback
    from tests.support.resuming import make

    class Waits(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                print("there", flush=True)
                time.sleep({seconds})

    make({output_dir!r}, callbacks=[Waits()], max_steps=8).train()
    print("not stopped", flush=True)
"""


def start(tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[3])
    code = textwrap.dedent(SCRIPT).format(root=root, output_dir=str(tmp_path / "out"), seconds=seconds)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "there":
            return process
    raise AssertionError(f"the script ended with {process.wait()}")


@pytest.mark.extended
def test_the_exit_code_of_a_process(tmp_path: Path) -> None:
    """A burst of signals is one request."""
    process = start(tmp_path, 1.0)
    for _ in range(4):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    output, _ = process.communicate(timeout=120)
    (kept,) = list_checkpoints(tmp_path / "out")
    assert process.returncode == 75
    assert "not stopped" not in output
    advice = f"To resume, {HOW_TO_RESUME}."
    assert f"{kept} is complete. Exit code 75: restart the job. {advice}" in output
    assert json.loads((kept / "trainer_state.json").read_text())["global_step"] == Manifest.read(kept).step


@pytest.mark.extended
def test_the_third_signal_ends_a_process_that_hangs(tmp_path: Path) -> None:
    process = start(tmp_path, 300.0)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(2.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


LEAVES = """
    import os, sys, time
    sys.path.insert(0, {root!r})
    from ds_trainer.training.stopping.signals import SignalCounter

    class LastOfAll:
        def __del__(self):  # in the interpreter's last moments, when Python has put its handlers away
            os.write(1, b"leaving\\n")
            time.sleep(2.0)

    kept = LastOfAll()
    kept.itself = kept
    with SignalCounter():
        sys.exit(75)
"""


def test_a_signal_during_exit_does_not_change_the_exit_code() -> None:
    """Launchers send SIGTERM to the other ranks when one has ended."""
    root = str(Path(__file__).parents[3])
    code = textwrap.dedent(LEAVES).format(root=root)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"leaving\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75


def test_ranks_vote_only_at_intervals() -> None:
    """With steps of a millisecond some hundred of them pass between two votes."""
    counts = pool(2).run(votes_of_a_run)
    assert counts[0] == counts[1]
    assert 2 <= counts[0] <= 8, "1000 steps in a second, and four votes a second"


def votes_of_a_run() -> int:
    ballot = stop_controller.StopVote(GroupVotes(distributed.dist.group.WORLD))
    ballot.now(None)
    votes = 0
    for step in range(1, 1001):
        if ballot.is_due(step):
            before = ballot._pending
            assert ballot.at(step, None, lambda: 0.001) is None
            votes += ballot._pending is not None and ballot._pending is not before
    ballot.finish()
    distributed.barrier()
    return votes

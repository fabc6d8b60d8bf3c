"""Background checkpoints hold the state of their step, and callbacks and ranks are notified in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.checkpoint.background import background_save as background
from ds_trainer.checkpoint.background import snapshot
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import list_checkpoints
from ds_trainer.checkpoint.protocol.checkpoint_save import SaveFailed
from ds_trainer.engine.state import state_shards
from tests.support.layouts import DATA, MODELS, pad
from tests.support.pool import pool


class Slow:
    """The disk is slow: a save takes until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.open, self._flush = threading.Event(), disk.flush
        disk.flush = self._wait  # type: ignore[assignment]

    def _wait(self, descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.open.wait(60)
        self._flush(descriptor)

    def end(self) -> None:
        self.open.set()
        disk.flush = self._flush


class Events(TrainerCallback):
    """Records when it is notified of which checkpoint, and whether that exists; unblocks the disk at a step."""

    def __init__(self, slow: Slow | None, until: int) -> None:
        self.slow, self.until = slow, until
        self.now = 0
        self.saves: list[tuple[int, int, bool]] = []
        self.order: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now = state.global_step
        if self.slow is not None and state.global_step == self.until:
            self.slow.open.set()
            # Wait for the thread that saves.
            for thread in threading.enumerate():
                if thread.name == background.THREAD_NAME and thread is not threading.current_thread():
                    thread.join(60)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        there = (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()
        self.saves.append((self.now, state.global_step, there))
        self.order.append(f"save {state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.order.append("end")


def trainer_of(output_dir: str, callbacks: Any = (), **arguments: Any) -> Trainer:
    values: dict[str, Any] = dict(
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        disable_tqdm=True,
        use_cpu=True,
    )
    args = TrainingArguments(output_dir, **{**values, **arguments})
    data = DATA["padded"]()
    return Trainer(MODELS["tied"](), args, pad, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def files_of(output_dir: str, stop_at: int, **arguments: Any) -> dict[str, bytes]:
    """Everything in the checkpoint of step 2, of a run to ``stop_at`` whose disk writes nothing before step 4."""
    slow = Slow() if stop_at > 2 else None
    trainer = trainer_of(output_dir, save_steps=1000, **arguments)

    class SaveOnce(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 2
            control.should_training_stop = state.global_step == stop_at
            if slow is not None and state.global_step == 4:
                slow.open.set()

    trainer.add_callback(SaveOnce)
    trainer.train()
    trainer.engine.close()
    if slow is not None:
        slow.end()
    found = {path.name: path.read_bytes() for path in (Path(output_dir) / "checkpoint-2").iterdir()}
    state = json.loads(found.pop("trainer_state.json"))
    assert state["global_step"] == 2
    assert [entry["step"] for entry in state["log_history"]] == [1, 2]
    del found["manifest.json"], found["training_args.json"]  # they tell of the time and the place
    return found


CASES = [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2, "bf16": True}, {"zero_stage": 3}]


@pytest.mark.cases(1)
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_the_checkpoint_is_that_of_its_step(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Byte for byte what a run writes that ends there, although two steps were taken before a byte was on the disk."""
    wanted = pool(2).run(run_files, str(tmp_path / "short"), 2, {**arguments, "save_async": False})
    found = pool(2).run(run_files, str(tmp_path / "long"), 6, arguments)
    assert wanted[0].keys() == found[0].keys()
    for name, data in wanted[0].items():
        assert data == found[0][name], name


def run_files(output_dir: str, stop_at: int, arguments: dict[str, Any]) -> dict[str, bytes]:
    return files_of(output_dir, stop_at, **arguments)


def run_without_waiting(output_dir: str) -> dict[str, bytes]:
    """Negative control: the step does not wait for the copy, which is made later."""
    wait, complete = snapshot.Snapshot.wait, snapshot.Snapshot.copy_deferred

    def late(self: snapshot.Snapshot) -> None:
        time.sleep(1.0)
        complete(self)

    snapshot.Snapshot.wait, snapshot.Snapshot.copy_deferred = (lambda self: None), late  # type: ignore[method-assign]
    try:
        return run_files(output_dir, 6, {"zero_stage": 1})
    finally:
        snapshot.Snapshot.wait, snapshot.Snapshot.copy_deferred = wait, complete  # type: ignore[method-assign]


def test_control_a_step_that_does_not_wait_is_detected(tmp_path: Path) -> None:
    wanted = pool(2).run(run_files, str(tmp_path / "short"), 2, {"zero_stage": 1, "save_async": False})
    found = pool(2).run(run_without_waiting, str(tmp_path / "long"))
    assert wanted[0]["rank_00000.safetensors"] != found[0]["rank_00000.safetensors"]


def events_of(output_dir: str, until: int, arguments: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    slow = Slow()
    events = Events(slow, until)
    trainer = trainer_of(output_dir, [events], **arguments)
    try:
        trainer.train()
    finally:
        slow.end()
    names = [path.name for path in list_checkpoints(Path(output_dir))]
    trainer.engine.close()
    return events.saves, events.order, names


def test_callbacks_are_called_when_the_checkpoint_is_complete(tmp_path: Path) -> None:
    for saves, order, names in pool(2).run(events_of, str(tmp_path), 3, {"max_steps": 5, "save_steps": 2}):
        # The first was due at step 2, and done at the boundary of step 3, where the ranks ask each other; the answer is
        # read at the next one. The last is waited for when training ends.
        assert saves[0] == (4, 2, True)
        assert [step for _, step, _ in saves] == [2, 4, 5]
        assert all(there for _, _, there in saves)
        assert order[-2:] == ["save 5", "end"]
        assert names == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_background_saves_run_one_at_a_time(tmp_path: Path) -> None:
    """The second save waits for the first: nothing is left out, nothing is mixed."""
    for saves, _, names in pool(2).run(events_of, str(tmp_path), 1, {"max_steps": 4, "save_steps": 1}):
        assert [step for _, step, _ in saves] == [1, 2, 3, 4]
        assert names == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]


def test_rotation_and_best_model_work_with_background_saves(tmp_path: Path) -> None:
    arguments = dict(
        max_steps=4,
        save_steps=1,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    (found,) = pool(1).run(best_of, str(tmp_path), arguments)
    assert found["best"] == str(tmp_path / f"checkpoint-{found['best_step']}")
    assert found["best_step"] == 4  # the loss falls
    assert found["names"] == ["checkpoint-3", "checkpoint-4"]


def best_of(output_dir: str, arguments: dict[str, Any]) -> dict[str, Any]:
    trainer = trainer_of(output_dir, **arguments)
    trainer.train()
    trainer.engine.close()
    state = trainer.state
    names = [path.name for path in list_checkpoints(Path(output_dir))]
    return {"best": state.best_model_checkpoint, "best_step": state.best_global_step, "names": names}


# -- failures ----------------------------------------------------------------------------------------------------------


def failing_save(output_dir: str, rank_that_fails: int, arguments: dict[str, Any]) -> tuple[str, int, list[str]]:
    import torch.distributed as dist

    flush, events = disk.flush, Events(None, 0)

    def full(descriptor: int) -> None:
        if dist.get_rank() == rank_that_fails and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        flush(descriptor)

    disk.flush = full  # type: ignore[assignment]
    trainer = trainer_of(output_dir, [events], **arguments)
    try:
        trainer.train()
        message = ""
    except SaveFailed as error:
        message = str(error)
    finally:
        disk.flush = flush
    step = trainer.state.global_step
    trainer.engine.close()
    assert events.saves == []
    return message, step, sorted(path.name for path in Path(output_dir).iterdir() if "checkpoint" in path.name)


def test_a_failed_save_is_raised_on_all_ranks_at_a_step_boundary(tmp_path: Path) -> None:
    found = pool(2).run(failing_save, str(tmp_path), 1, {"save_steps": 2, "max_steps": 20})
    for message, step, left in found:
        assert "checkpoint-2" in message and "rank 1" in message and "No space left" in message
        assert 3 <= step <= 4  # soon after, and not after another save
        assert left == []
    assert found[0][1] == found[1][1]


def test_training_continues_after_a_failed_save_if_requested(tmp_path: Path) -> None:
    arguments = {"save_steps": 2, "max_steps": 5, "save_failure_policy": "continue"}
    for message, step, left in pool(2).run(failing_save, str(tmp_path), 1, arguments):
        assert (message, step, left) == ("", 5, [])


def waits_to_be_written(output_dir: str) -> tuple[str, list[str]]:
    """A callback fails while a checkpoint is being written."""

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                threading.Timer(0.5, slow.open.set).start()
                raise ZeroDivisionError("of the user")

    slow = Slow()
    trainer = trainer_of(output_dir, [Fails()], max_steps=6)
    try:
        trainer.train()
        message = ""
    except ZeroDivisionError as error:
        message = str(error)
    finally:
        slow.end()
    trainer.engine.close()
    return message, [path.name for path in list_checkpoints(Path(output_dir))]


def test_a_training_that_raises_finishes_its_checkpoint(tmp_path: Path) -> None:
    for found in pool(2).run(waits_to_be_written, str(tmp_path)):
        assert found == ("of the user", ["checkpoint-2"])


SCRIPT = """
    import os, signal, sys, time
    sys.path.insert(0, {root!r})
    from ds_trainer import TrainerCallback
    from ds_trainer.checkpoint.protocol import disk
    from tests.training.resume.test_background_saves import trainer_of

    flush = disk.flush
    def slow(descriptor):
        time.sleep(0.5)
        flush(descriptor)

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 2
            if state.global_step == 3:
                disk.flush = flush if {quick} else slow
                os.kill(os.getpid(), signal.{signal})
                time.sleep(30)

    disk.flush = slow
    trainer_of({output_dir!r}, [Ends()], max_steps=8, save_strategy="no").train()
"""


@pytest.mark.extended
@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "left"), [("SIGTERM", ["checkpoint-2"]), ("SIGKILL", [])])
def test_sigterm_waits_for_the_checkpoint(name: str, left: list[str], tmp_path: Path) -> None:
    """... that a callback asked for, and ends the process as it would without us: with ``save_strategy="no"`` nobody
    asked for a stop that saves (:mod:`tests.training.stopping`). SIGKILL is the control: the disk was slow indeed."""
    root = str(Path(__file__).parents[2])
    code = textwrap.dedent(SCRIPT).format(root=root, output_dir=str(tmp_path), signal=name, quick=False)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert completed.returncode == -getattr(signal, name), completed.stderr
    assert [path.name for path in list_checkpoints(tmp_path)] == left


# -- where there is no copy --------------------------------------------------------------------------------------------


def saved_while_waiting(output_dir: str, arguments: dict[str, Any], room: float) -> tuple[int, list[str]]:
    """How many saves ran in a thread."""
    begun, memory_fraction = [], snapshot.MEMORY_FRACTION
    work = background.BackgroundSave._save

    def count(self: Any) -> Path:
        begun.append(1)
        return work(self)

    background.BackgroundSave._save, snapshot.MEMORY_FRACTION = count, room  # type: ignore[method-assign]
    try:
        trainer = trainer_of(output_dir, max_steps=4, **arguments)
        trainer.train()
        trainer.engine.close()
    finally:
        background.BackgroundSave._save, snapshot.MEMORY_FRACTION = work, memory_fraction  # type: ignore[method-assign]
    return len(begun), [path.name for path in list_checkpoints(Path(output_dir))]


@pytest.mark.parametrize(
    ("arguments", "room", "threads"), [({}, 0.7, 2), ({"save_async": False}, 0.7, 0), ({}, 0.0, 0)]
)
def test_without_memory_for_a_copy_training_waits(
    arguments: dict[str, Any], room: float, threads: int, tmp_path: Path
) -> None:
    for found in pool(2).run(saved_while_waiting, str(tmp_path), arguments, room):
        assert found == (threads, ["checkpoint-2", "checkpoint-4"])


def which_shards_wait(output_dir: str, arguments: dict[str, Any]) -> tuple[set[str], set[str]]:
    trainer = trainer_of(output_dir, max_steps=1, save_strategy="no", **arguments)
    trainer.train()
    waits = state_shards.changed_only_by_steps(trainer.engine)
    kinds: tuple[set[str], set[str]] = (set(), set())
    for unit in state_shards.read_state_shards(trainer.engine):
        for shard in unit.tensors:
            kinds[waits(shard)].add(shard.kind)
    trainer.engine.close()
    return kinds


def test_model_weights_are_copied_at_once(tmp_path: Path) -> None:
    """Without masters the weights are the model's own, which a forward pass might change."""
    moments = {"exp_avg", "exp_avg_sq"}
    assert pool(1).run(which_shards_wait, str(tmp_path), {"zero_stage": 0}) == [({"master"}, moments)]
    assert pool(1).run(which_shards_wait, str(tmp_path), {"zero_stage": 3}) == [(set(), moments | {"master"})]

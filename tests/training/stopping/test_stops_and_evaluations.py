"""A stop requested when an evaluation is due or running: the resumed run makes it; nothing else differs."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer
from ds_trainer.training.stopping import stop_controller
from ds_trainer.training.stopping.stop_controller import StopController, StopRequest, TrainingStopped
from ds_trainer.utils import distributed
from ds_trainer.utils.host_votes import GroupVotes
from tests.support.pool import pool
from tests.support.resuming import StopAt, Tokens, differences, make, record_batches, run_record
from tests.support.stop_requests import ActAtStep, send

STEPS = 8


def test_an_evaluation_that_was_due_is_made_after_resuming(tmp_path: Path) -> None:
    """The schedule follows its result, so that leaving it out would be seen."""
    more: dict[str, Any] = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "warmup_steps": 0,
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0, "factor": 0.5},
        "metric_for_best_model": "loss",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    evaluated = partial(evaluating, **more)
    (uninterrupted,) = pool(1).run(evaluated, str(tmp_path / "whole"), False)
    ((code, step),) = pool(1).run(evaluated, str(tmp_path / "out"), True)
    assert code == 75
    (resumed,) = pool(1).run(evaluated, str(tmp_path / "out"), False)
    assert resumed == ([f"evaluate {at}" for at in range(step, STEPS + 1)], uninterrupted[1])
    rates = [rate for _, _, rate in uninterrupted[1].logs]
    assert rates[-1] < 0.1 * rates[0]


class InRound(ActAtStep):
    """Asks for a stop after some micro_steps of the evaluation of a step."""

    def __init__(self, step: int, action: Callable[[], None], after: int) -> None:
        super().__init__(step, action)
        self.after, self.micro_steps = after, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.micro_steps = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.micro_steps = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.micro_steps += 1
        if (state.global_step, self.micro_steps) == (self.step, self.after):
            self.action()


class DrawsAtRandom(Trainer):
    """Evaluations that use up random numbers, as a sampler or a generation does."""

    def prediction_step(self, *args: Any, **keywords: Any) -> Any:
        torch.rand(3)
        random.random()
        return super().prediction_step(*args, **keywords)


def within_evaluation(output_dir: str, step: int, after: int, stops: bool, resumes: bool, **more: Any) -> Any:
    """What became of a run whose evaluation of ``step`` is interrupted: its end, micro-steps done then, messages."""
    stop_controller.SECONDS_BETWEEN = 0.0
    rank = distributed.rank()
    action = partial(send, signal.SIGUSR1) if stops and rank == distributed.world_size() - 1 else lambda: None
    callback = InRound(step, action, after)
    trainer_class: Any = partial(DrawsAtRandom, eval_dataset=more.pop("sets", None) or Tokens())
    trainer = make(
        output_dir,
        callbacks=[callback, *more.pop("callbacks", [])],
        auto_resume=resumes,
        trainer_class=trainer_class,
        per_device_eval_batch_size=2,
        **more,
    )
    batches = record_batches(trainer)
    try:
        trainer.train()
    except TrainingStopped as stop:
        trainer.engine.close()
        return stop.code, stop.step, callback.micro_steps, callback.events, run_record(trainer, batches)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop_controller.SECONDS_BETWEEN = 0.25
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    of_time = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    losses = [{name: value for name, value in entry.items() if name not in of_time} for entry in evaluations]
    return losses, callback.events, run_record(trainer, batches)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world", "step", "more"),
    [
        (1, 4, {"eval_strategy": "steps", "eval_steps": 4}),
        (2, 4, {"eval_strategy": "steps", "eval_steps": 4, "zero_stage": 3}),
        (2, 5, {"eval_strategy": "epoch", "save_strategy": "epoch", "zero_stage": 1}),
        (2, 8, {"eval_strategy": "steps", "eval_steps": 4, "zero_stage": 2, "bf16": True, "save_async": False}),
    ],
    ids=str,
)
def test_an_interrupted_evaluation_is_repeated_after_resuming(
    world: int, step: int, more: dict[str, Any], tmp_path: Path
) -> None:
    uninterrupted = pool(world).run(partial(within_evaluation, str(tmp_path / "whole"), step, 3, False, False, **more))
    found = pool(world).run(partial(within_evaluation, str(tmp_path / "out"), step, 3, True, False, **more))
    assert {(code, at) for code, at, *_ in found} == {(75, step)}
    micro_steps = {micro_steps for _, _, micro_steps, _, _ in found}
    assert len(micro_steps) == 1 and 3 <= micro_steps.pop() <= 5, "of ten or more"
    for _, _, _, events, _ in found:
        assert f"evaluate {step}" not in events and events[-2:] == [f"save {step}", "end"]
    resumed = pool(world).run(partial(within_evaluation, str(tmp_path / "out"), step, 3, False, True, **more))
    for (losses, _, record), (same_losses, events, same_record) in zip(uninterrupted, resumed, strict=True):
        assert losses == same_losses and len(losses) == 2
        assert events[0] == f"evaluate {step}"
        assert differences(same_record, record, len(same_record.batches)) == []


def test_an_evaluation_reported_to_callbacks_is_completed(tmp_path: Path) -> None:
    """Of two sets the first is done when the signal comes: the run stops at the next step."""
    sets: Any = {"one": Tokens(), "two": Tokens()}
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "sets": sets}
    ((code, step, micro_steps, events, _),) = pool(1).run(
        partial(within_evaluation, str(tmp_path), 4, 25, True, False, **more)
    )
    assert (code, step, micro_steps) == (75, 5, 0)
    assert events == ["evaluate 4", "evaluate 4", "save 4", "save 5", "end"]


def test_a_run_ended_by_a_callback_is_not_resumed(tmp_path: Path) -> None:
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "callbacks": [StopAt(4)]}
    ((losses, events, record),) = pool(1).run(partial(within_evaluation, str(tmp_path), 4, 3, True, False, **more))
    assert (len(losses), events, record.step) == (1, ["evaluate 4", "save 4", "end"], 4)


def evaluating(output_dir: str, stops: bool, **more: Any) -> Any:
    stop_controller.SECONDS_BETWEEN = 0.0
    callback = ActAtStep(3, partial(send, signal.SIGUSR1) if stops else lambda: None)
    trainer_class: Any = partial(Trainer, eval_dataset=Tokens())
    trainer = make(output_dir, callbacks=[callback], auto_resume=True, trainer_class=trainer_class, **more)
    try:
        trainer.train()
    except TrainingStopped as stop:
        trainer.engine.close()
        return stop.code, stop.step
    events = [one for one in callback.events if one.startswith("evaluate")]
    return events, run_record(trainer, [])


def test_evaluation_micro_steps_have_their_own_vote_interval() -> None:
    """Quick steps let hundreds of boundaries pass between two votes; micro_steps that take seconds must not."""
    assert pool(2).run(boundaries_until_agreed, False) == [None, None]
    assert pool(2).run(boundaries_until_agreed, True) == [2, 2]


def boundaries_until_agreed(paced: bool) -> int | None:
    """How many boundaries pass until all ranks agree on a request made at the first; None for more than 20."""
    ballot = stop_controller.StopVote(GroupVotes(distributed.dist.group.WORLD))
    ballot.now(None)
    for step in (1, 2):
        ballot.at(step, None, lambda: 0.001)
    ballot.at(2 + 250, None, lambda: 0.001)  # under way when the evaluation begins
    if paced:
        ballot.change_pace()
    request = StopRequest(75, "SIGTERM", 1) if distributed.rank() == 1 else None
    found = None
    for boundary_index in range(1, 21):
        if ballot.is_due(252 + boundary_index) and ballot.at(252 + boundary_index, request, lambda: 1.0) is not None:
            found = boundary_index
            break
    ballot.finish()
    distributed.barrier()
    return found


def test_a_stop_file_is_found_at_any_check(tmp_path: Path) -> None:
    """The clock by which it is looked for and the steps at which ranks vote are not in time with each other."""
    assert pool(2).run(boundaries_until_file_is_seen, str(tmp_path)) == [2, 2]


def boundaries_until_file_is_seen(output_dir: str) -> int | None:
    """Steps take half of the time between two votes, so that every other boundary only reads one; None for over 20."""
    clock, real = [0.0], time.perf_counter
    time.perf_counter = lambda: clock[0]  # type: ignore[assignment]
    try:
        stopper = StopController(Path(output_dir), True, True, 0.0, GroupVotes(distributed.dist.group.WORLD))
        stopper.before_first_step()
        found = None
        for boundary in range(1, 25):
            if boundary == 4 and distributed.rank() == 0:
                (Path(output_dir) / "STOP").touch()
            clock[0] += stop_controller.SECONDS_BETWEEN / 2
            if stopper.after_step():
                found = boundary - 4
                break
        stopper.no_more_steps()
        distributed.barrier()
        return found
    finally:
        time.perf_counter = real  # type: ignore[assignment]


def test_time_limits_account_for_evaluation_micro_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_TRAINER_JOB_END", str(time.time() + 300.0))
    stopper = StopController(tmp_path, True, True, 0.0, None)
    stopper.note_save(0.0)
    clock = [0.0]

    def boundary(seconds: float) -> bool:
        clock[0] += seconds
        return stopper.after_step()

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    with stopper:
        assert not stopper.before_first_step()
        assert not boundary(1.0)
        with stopper.evaluation():
            assert not boundary(90.0)
            assert boundary(110.0), "three of these are more than what is left"
        assert not boundary(1.0), "steps are quick, however long the evaluation was"

"""A stop that is asked for when an evaluation is due, or under way: whoever goes on makes it; nothing else differs."""

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
from ds_trainer.training.stopping import vote
from ds_trainer.training.stopping.request import StopRequest
from ds_trainer.training.stopping.stopper import Stopper, TrainingStopped
from ds_trainer.utils import distributed
from ds_trainer.utils.host_votes import GroupVotes
from tests.support.asking import At, send
from tests.support.pool import pool
from tests.support.resuming import StopAt, Tokens, differences, make, told, watched

STEPS = 8


def test_an_evaluation_that_was_due_is_made_by_who_goes_on(tmp_path: Path) -> None:
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
    (whole,) = pool(1).run(evaluated, str(tmp_path / "whole"), False)
    ((code, step),) = pool(1).run(evaluated, str(tmp_path / "out"), True)
    assert code == 75
    (resumed,) = pool(1).run(evaluated, str(tmp_path / "out"), False)
    assert resumed == ([f"evaluate {at}" for at in range(step, STEPS + 1)], whole[1])
    rates = [rate for _, _, rate in whole[1].logs]
    assert rates[-1] < 0.1 * rates[0]


class InRound(At):
    """Asks for a stop after some rounds of the evaluation of a step."""

    def __init__(self, step: int, action: Callable[[], None], after: int) -> None:
        super().__init__(step, action)
        self.after, self.rounds = after, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rounds = 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rounds = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rounds += 1
        if (state.global_step, self.rounds) == (self.step, self.after):
            self.action()


class DrawsAtRandom(Trainer):
    """Evaluations that use up random numbers, as a sampler or a generation does."""

    def prediction_step(self, *args: Any, **keywords: Any) -> Any:
        torch.rand(3)
        random.random()
        return super().prediction_step(*args, **keywords)


def within_evaluation(output_dir: str, step: int, after: int, stops: bool, resumes: bool, **more: Any) -> Any:
    """What became of a run whose evaluation of ``step`` is interrupted: its end, rounds done then, what is heard."""
    vote.SECONDS_BETWEEN = 0.0
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
    batches = watched(trainer)
    try:
        trainer.train()
    except TrainingStopped as stop:
        trainer.engine.close()
        return stop.code, stop.step, callback.rounds, callback.heard, told(trainer, batches)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        vote.SECONDS_BETWEEN = 0.25
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    of_time = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    losses = [{name: value for name, value in entry.items() if name not in of_time} for entry in evaluations]
    return losses, callback.heard, told(trainer, batches)


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
def test_an_evaluation_is_given_up_and_made_anew(world: int, step: int, more: dict[str, Any], tmp_path: Path) -> None:
    whole = pool(world).run(partial(within_evaluation, str(tmp_path / "whole"), step, 3, False, False, **more))
    found = pool(world).run(partial(within_evaluation, str(tmp_path / "out"), step, 3, True, False, **more))
    assert {(code, at) for code, at, *_ in found} == {(75, step)}
    rounds = {rounds for _, _, rounds, _, _ in found}
    assert len(rounds) == 1 and 3 <= rounds.pop() <= 5, "of ten or more"
    for _, _, _, heard, _ in found:
        assert f"evaluate {step}" not in heard and heard[-2:] == [f"save {step}", "end"]
    resumed = pool(world).run(partial(within_evaluation, str(tmp_path / "out"), step, 3, False, True, **more))
    for (losses, _, story), (same_losses, heard, same_story) in zip(whole, resumed, strict=True):
        assert losses == same_losses and len(losses) == 2
        assert heard[0] == f"evaluate {step}"
        assert differences(same_story, story, len(same_story.batches)) == []


def test_what_callbacks_have_heard_of_is_made_to_its_end(tmp_path: Path) -> None:
    """Of two sets the first is done when the signal comes: the run stops at the next step."""
    sets: Any = {"one": Tokens(), "two": Tokens()}
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "sets": sets}
    ((code, step, rounds, heard, _),) = pool(1).run(
        partial(within_evaluation, str(tmp_path), 4, 25, True, False, **more)
    )
    assert (code, step, rounds) == (75, 5, 0)
    assert heard == ["evaluate 4", "evaluate 4", "save 4", "save 5", "end"]


def test_a_run_that_a_callback_has_ended_does_not_go_on_elsewhere(tmp_path: Path) -> None:
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "callbacks": [StopAt(4)]}
    ((losses, heard, story),) = pool(1).run(partial(within_evaluation, str(tmp_path), 4, 3, True, False, **more))
    assert (len(losses), heard, story.step) == (1, ["evaluate 4", "save 4", "end"], 4)


def evaluating(output_dir: str, stops: bool, **more: Any) -> Any:
    vote.SECONDS_BETWEEN = 0.0
    callback = At(3, partial(send, signal.SIGUSR1) if stops else lambda: None)
    trainer_class: Any = partial(Trainer, eval_dataset=Tokens())
    trainer = make(output_dir, callbacks=[callback], auto_resume=True, trainer_class=trainer_class, **more)
    try:
        trainer.train()
    except TrainingStopped as stop:
        trainer.engine.close()
        return stop.code, stop.step
    heard = [one for one in callback.heard if one.startswith("evaluate")]
    return heard, told(trainer, [])


def test_rounds_of_an_evaluation_are_slower_than_steps() -> None:
    """Quick steps let hundreds of boundaries pass between two votes; rounds that take seconds must not."""
    assert pool(2).run(boundaries_until_agreed, False) == [None, None]
    assert pool(2).run(boundaries_until_agreed, True) == [2, 2]


def boundaries_until_agreed(paced: bool) -> int | None:
    """How many rounds pass until all know what one rank wishes at the first of them; None for more than 20."""
    ballot = vote.StopVote(GroupVotes(distributed.dist.group.WORLD))
    ballot.now(None)
    for step in (1, 2):
        ballot.at(step, None, 0.001)
    ballot.at(2 + 250, None, 0.001)  # under way when the evaluation begins
    if paced:
        ballot.change_pace()
    wish = StopRequest(75, "SIGTERM", 1) if distributed.rank() == 1 else None
    found = None
    for round_ in range(1, 21):
        if ballot.is_due(252 + round_) and ballot.at(252 + round_, wish, 1.0) is not None:
            found = round_
            break
    ballot.finish()
    distributed.barrier()
    return found


def test_a_stop_file_is_found_whenever_it_is_looked_for(tmp_path: Path) -> None:
    """The clock by which it is looked for and the steps at which ranks vote are not in time with each other."""
    assert pool(2).run(boundaries_until_file_is_seen, str(tmp_path)) == [2, 2]


def boundaries_until_file_is_seen(output_dir: str) -> int | None:
    """Steps take half of the time between two votes, so that every other boundary only reads one; None for over 20."""
    clock, real = [0.0], time.perf_counter
    time.perf_counter = lambda: clock[0]  # type: ignore[assignment]
    try:
        stopper = Stopper(Path(output_dir), True, True, 0.0, GroupVotes(distributed.dist.group.WORLD))
        stopper.before_first_step()
        found = None
        for boundary in range(1, 25):
            if boundary == 4 and distributed.rank() == 0:
                (Path(output_dir) / "STOP").touch()
            clock[0] += vote.SECONDS_BETWEEN / 2
            if stopper.after_step():
                found = boundary - 4
                break
        stopper.no_more_steps()
        distributed.barrier()
        return found
    finally:
        time.perf_counter = real  # type: ignore[assignment]


def test_time_limits_know_how_long_rounds_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_TRAINER_JOB_END", str(time.time() + 300.0))
    stopper = Stopper(tmp_path, True, True, 0.0, None)
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

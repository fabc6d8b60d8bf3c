"""The events of a run, in order, with their arguments, compared with transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.library import FullTokens, Library, assert_same, both, trained

EVENTS = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end", "on_evaluate", "on_predict"),
    *("on_save", "on_log", "on_prediction_step"),
)
EVENT_ARGUMENTS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


def listener(library: Library) -> Any:
    """A callback that writes down every event, where it happens and which keywords are there and set."""
    events: list[Any] = []

    def listen(event: str) -> Any:
        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            switches = [name for name, value in vars(control).items() if value is True]
            given = sorted(name for name in EVENT_ARGUMENTS if kwargs.get(name) is not None)
            others = sorted(set(kwargs) - set(EVENT_ARGUMENTS))
            events.append((event, state.global_step, state.epoch or 0, switches, given, others))

        return method

    cls = type("Listener", (library.module.TrainerCallback,), {event: listen(event) for event in EVENTS})
    return cls(), events


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "evaluation and saving": {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3},
    "by epochs": {
        "max_steps": -1,
        "num_train_epochs": 2,
        "logging_strategy": "epoch",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    },
    "evaluation at the start": {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", RUNS)
def test_events_and_their_arguments(name: str, tmp_path: Path) -> None:
    def script(library: Library) -> Any:
        callback, events = listener(library)
        library.trainer(RUNS[name], eval_dataset=FullTokens(9), callbacks=[callback]).train()
        return events

    ours, reference = both(script, tmp_path)
    assert len(reference) > 15
    assert [event[:3] for event in ours] == [event[:3] for event in reference]
    assert_same(ours, reference)


def stopping(library: Library, where: str, switch: str, at: int) -> Any:
    def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == at:
            setattr(control, switch, True)
        return control

    return type("Steering", (library.module.TrainerCallback,), {where: method})


CONTROLLED = {
    "stop after a step": ("on_step_end", "should_training_stop", 3),
    "stop an epoch": ("on_step_end", "should_epoch_stop", 2),
    "stop at an epoch's end": ("on_epoch_end", "should_training_stop", 5),
    "evaluate now": ("on_step_end", "should_evaluate", 2),
    "save now": ("on_step_end", "should_save", 2),
    "log at the epoch's end": ("on_epoch_end", "should_log", 5),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CONTROLLED)
def test_callbacks_that_set_the_control(name: str, tmp_path: Path) -> None:
    where, switch, at = CONTROLLED[name]

    def script(library: Library) -> Any:
        changes = {"max_steps": 8, "logging_steps": 2}
        steering = stopping(library, where, switch, at)
        trainer = library.trainer(changes, eval_dataset=FullTokens(9), callbacks=[steering])
        report = trained(trainer)
        report["saved"] = sorted(path.name for path in library.directory.glob("checkpoint-*"))
        return report

    assert_same(*both(script, tmp_path))


def test_callbacks_added_popped_and_removed(tmp_path: Path) -> None:
    def script(library: Library) -> Any:
        first, events = listener(library)
        second, unheard = listener(library)
        trainer = library.trainer()
        trainer.add_callback(first)
        trainer.add_callback(second)
        popped = trainer.pop_callback(second)
        nothing = trainer.pop_callback(type("Stranger", (library.module.TrainerCallback,), {}))
        trainer.remove_callback(library.module.PrinterCallback)
        trainer.train()
        return [popped is second, nothing, len(unheard), [event[0] for event in events]]

    assert_same(*both(script, tmp_path))

"""When the default flow acts, as in transformers."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import trainer_callback as theirs
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ds_trainer.callbacks.defaults import DefaultFlowCallback
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerControl, TrainerState


class PlainEnum(Enum):
    """A strategy enum whose members are no strings themselves."""

    no = "no"
    steps = "steps"
    epoch = "epoch"
    best = "best"


def flow_args(**changes: Any) -> SimpleNamespace:
    values = {
        "logging_strategy": "no", "eval_strategy": "no", "save_strategy": "no",
        "logging_first_step": False, "eval_delay": 0
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def decide(step: int, max_steps: int, args: SimpleNamespace, **state: Any) -> TrainerControl:
    trainer_state = TrainerState(global_step=step, max_steps=max_steps, **state)
    return CallbackHandler([DefaultFlowCallback]).on_step_end(args, trainer_state, TrainerControl())


@settings(max_examples=300)
@given(
    logging_strategy=st.sampled_from(IntervalStrategy),
    eval_strategy=st.sampled_from(IntervalStrategy),
    save_strategy=st.sampled_from(SaveStrategy),
    logging_steps=st.integers(1, 7),
    eval_steps=st.integers(1, 7),
    save_steps=st.integers(0, 7),
    logging_first_step=st.booleans(),
    eval_delay=st.one_of(st.integers(0, 12), st.floats(0, 3)),
    steps_in_epoch=st.integers(1, 6),
    max_steps=st.integers(1, 15),
    form=st.sampled_from([lambda strategy: strategy, lambda strategy: strategy.value, lambda s: PlainEnum[s.value]]),
)
def test_every_decision_is_that_of_transformers(
    logging_strategy: IntervalStrategy,
    eval_strategy: IntervalStrategy,
    save_strategy: SaveStrategy,
    logging_steps: int,
    eval_steps: int,
    save_steps: int,
    logging_first_step: bool,
    eval_delay: float,
    steps_in_epoch: int,
    max_steps: int,
    form: Any,
) -> None:
    """A whole run through both handlers, in the order of events of the loop, with the states of either side."""
    rest = {"logging_first_step": logging_first_step, "eval_delay": eval_delay}
    their_args = SimpleNamespace(
        logging_strategy=logging_strategy, eval_strategy=eval_strategy, save_strategy=save_strategy, **rest
    )
    our_args = SimpleNamespace(
        logging_strategy=form(logging_strategy),
        eval_strategy=form(eval_strategy),
        save_strategy=form(save_strategy),
        **rest,
    )
    numbers = {
        "max_steps": max_steps, "logging_steps": logging_steps, "eval_steps": eval_steps, "save_steps": save_steps
    }  # fmt: skip
    # Their callback in our handler is the third: callbacks of transformers must run here unchanged.
    runs = [
        (CallbackHandler([DefaultFlowCallback]), our_args, TrainerState(**numbers), TrainerControl()),
        (
            theirs.CallbackHandler([theirs.DefaultFlowCallback], None, None, None, None),
            their_args,
            theirs.TrainerState(**numbers),
            theirs.TrainerControl(),
        ),
        (CallbackHandler([theirs.DefaultFlowCallback]), their_args, TrainerState(**numbers), TrainerControl()),
    ]
    histories = []
    for handler, args, state, control in runs:
        history = []
        control = handler.on_train_begin(args, state, control)
        while not control.should_training_stop:
            control = handler.on_epoch_begin(args, state, control)
            for _ in range(steps_in_epoch):
                control = handler.on_step_begin(args, state, control)
                state.global_step += 1
                state.epoch = state.global_step / steps_in_epoch
                control = handler.on_step_end(args, state, control)
                history.append((state.global_step, control.state()["args"]))
                if control.should_training_stop:
                    break
            control = handler.on_epoch_end(args, state, control)
            history.append((state.global_step, control.state()["args"]))
        histories.append(history)
    ours, original, borrowed = histories
    if logging_strategy == IntervalStrategy.STEPS:  # a deliberate difference: we log the last step
        assert ours[-1][1]["should_log"]
        for history in histories:
            for step, flags in history:
                if step == max_steps:
                    flags["should_log"] = True
    assert ours == original == borrowed
    assert ours[-1][0] == max_steps


def test_logging() -> None:
    args = flow_args(logging_strategy="steps", logging_first_step=True)
    logged = [step for step in range(1, 12) if decide(step, 99, args, logging_steps=5).should_log]
    assert logged == [1, 5, 10]
    assert decide(1, 99, flow_args(logging_first_step=True)).should_log


def test_the_last_step_is_logged_evaluated_and_saved_and_ends_the_run() -> None:
    args = flow_args(eval_strategy="steps", save_strategy="steps", logging_strategy="steps")
    controls = {step: decide(step, 10, args, eval_steps=4, save_steps=3, logging_steps=6) for step in range(1, 11)}
    assert [step for step, control in controls.items() if control.should_evaluate] == [4, 8, 10]
    assert [step for step, control in controls.items() if control.should_save] == [3, 6, 9, 10]
    assert [step for step, control in controls.items() if control.should_log] == [6, 10]
    assert [step for step, control in controls.items() if control.should_training_stop] == [10]


def test_save_strategy_best_is_handled_by_the_loop() -> None:
    args = flow_args(save_strategy="best", eval_strategy="steps")
    control = decide(10, 10, args, eval_steps=5)
    assert control.should_evaluate and not control.should_save
    control.should_save = True
    assert CallbackHandler([DefaultFlowCallback]).on_epoch_end(args, TrainerState(), control).should_save


def test_intervals_below_one_mean_never() -> None:
    args = flow_args(logging_strategy="steps", eval_strategy="steps", save_strategy="steps")
    for never in (0, -1):
        control = decide(6, 10, args, logging_steps=never, eval_steps=never, save_steps=never)
        assert control == TrainerControl()


def test_eval_delay_may_be_none() -> None:
    args = flow_args(eval_strategy="epoch", eval_delay=None)
    assert CallbackHandler([DefaultFlowCallback]).on_epoch_end(args, TrainerState(), TrainerControl()).should_evaluate

"""When the default flow acts (as in transformers), and what the progress callbacks show on terminals and elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import trainer_callback as theirs
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback, ProgressCallback
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
        "logging_first_step": False, "eval_delay": 0,
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
        "max_steps": max_steps, "logging_steps": logging_steps, "eval_steps": eval_steps, "save_steps": save_steps,
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
    assert ours == original == borrowed
    assert ours[-1][0] == max_steps


def test_logging() -> None:
    args = flow_args(logging_strategy="steps", logging_first_step=True)
    logged = [step for step in range(1, 12) if decide(step, 99, args, logging_steps=5).should_log]
    assert logged == [1, 5, 10]
    assert decide(1, 99, flow_args(logging_first_step=True)).should_log


def test_the_last_step_is_evaluated_and_saved_and_ends_the_run() -> None:
    args = flow_args(eval_strategy="steps", save_strategy="steps", logging_strategy="steps")
    controls = {step: decide(step, 10, args, eval_steps=4, save_steps=3, logging_steps=6) for step in range(1, 11)}
    assert [step for step, control in controls.items() if control.should_evaluate] == [4, 8, 10]
    assert [step for step, control in controls.items() if control.should_save] == [3, 6, 9, 10]
    assert [step for step, control in controls.items() if control.should_log] == [6]
    assert [step for step, control in controls.items() if control.should_training_stop] == [10]


def test_saving_the_best_is_left_to_the_loop() -> None:
    args = flow_args(save_strategy="best", eval_strategy="steps")
    control = decide(10, 10, args, eval_steps=5)
    assert control.should_evaluate and not control.should_save
    control.should_save = True
    assert CallbackHandler([DefaultFlowCallback]).on_epoch_end(args, TrainerState(), control).should_save


def test_steps_below_one_mean_never() -> None:
    args = flow_args(logging_strategy="steps", eval_strategy="steps", save_strategy="steps")
    for never in (0, -1):
        control = decide(6, 10, args, logging_steps=never, eval_steps=never, save_steps=never)
        assert control == TrainerControl()


def test_no_delay_may_be_none() -> None:
    args = flow_args(eval_strategy="epoch", eval_delay=None)
    assert CallbackHandler([DefaultFlowCallback]).on_epoch_end(args, TrainerState(), TrainerControl()).should_evaluate


class Terminal:
    """A real terminal (a pseudo one) behind standard output and error."""

    def __init__(self, lines: int, columns: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding="utf-8")

    def text(self) -> str:
        """What has been written since the last call."""
        self.stream.flush()
        data = b""
        while select.select([self._master], [], [], 0.05)[0]:
            data += os.read(self._master, 65536)
        return data.decode("utf-8")

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Terminal]]:
    """Puts a terminal behind standard output and error. Called by the test itself: pytest sets both before it runs."""
    opened: list[Terminal] = []

    def open_one(lines: int = 40, columns: int = 140) -> Terminal:
        opened.append(Terminal(lines, columns))
        monkeypatch.setattr(sys, "stderr", opened[-1].stream)
        monkeypatch.setattr(sys, "stdout", opened[-1].stream)
        return opened[-1]

    yield open_one
    monkeypatch.undo()
    for terminal in opened:
        terminal.close()


TRAIN_LOGS = {
    "loss": 2.3141, "learning_rate": 2.9e-3, "grad_norm": 0.84, "epoch": 0.1333,
    "tokens_per_second": 12_345.0, "memory_gb": 0.81,
}  # fmt: skip
TRAIN_LINE = "step 40/300  epoch 0.13  loss 2.314  lr 2.9e-03  grad norm 0.84  12.3k tok/s  0.81 GB"
EVAL_LOGS = {"eval_loss": 2.25, "eval_runtime": 1.5, "epoch": 0.1333}
EVAL_LINE = "step 40/300  epoch 0.13  eval loss 2.250  eval time 1.50 s"


class Run:
    """The loop's side of a run: the events in their order."""

    def __init__(self, *callbacks: Any, step: int = 0, disable_tqdm: bool = False, **state: Any) -> None:
        self.handler = CallbackHandler([DefaultFlowCallback, *callbacks])
        self.args = flow_args(disable_tqdm=disable_tqdm)
        self.state = TrainerState(max_steps=300, global_step=step, **state)
        self.control = TrainerControl()

    def fire(self, event: str, *result: Any) -> None:
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, *result)

    def steps(self, until: int) -> None:
        while self.state.global_step < until:
            self.state.global_step += 1
            self.fire("on_step_end")

    def evaluate(self, loader: Any, batches: int) -> None:
        self.handler.eval_dataloader = loader
        for _ in range(batches):
            self.fire("on_prediction_step")
        self.fire("on_log", EVAL_LOGS)
        self.fire("on_evaluate", EVAL_LOGS)


def test_where_there_is_no_terminal_each_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(ProgressCallback)
    run.fire("on_train_begin")
    run.steps(40)
    run.fire("on_log", TRAIN_LOGS)
    run.evaluate([0] * 3, 3)
    run.fire("on_log", {"train_runtime": 75.0, "train_loss": 2.5})
    run.fire("on_train_end")
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [TRAIN_LINE, EVAL_LINE, "step 40/300  train time 1 min 15 s  train loss 2.500"]
    assert shown.err == ""


def test_lines_reach_a_pipe_at_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.txt"
    with open(path, "w", encoding="utf-8") as stream:  # a file is buffered by blocks
        monkeypatch.setattr(sys, "stdout", stream)
        for callback in (ProgressCallback, PrinterCallback):
            run = Run(callback, step=40)
            run.fire("on_train_begin")
            run.fire("on_log", TRAIN_LOGS)
            assert path.read_text().splitlines()[-1] == TRAIN_LINE
        assert path.read_text().splitlines() == [TRAIN_LINE] * 2
        monkeypatch.undo()


def test_on_a_terminal_the_bar_carries_the_values(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback)
    run.fire("on_train_begin")
    assert "0/300" in terminal.text()
    run.steps(40)
    terminal.text()
    run.fire("on_log", TRAIN_LOGS)
    shown = terminal.text()
    assert re.search(
        r"13%\|.*\| 40/300 \[\d\d:\d\d<\d\d:\d\d, loss 2.314  lr 2.9e-03  grad norm 0.84  12.3k tok/s  0.81 GB\]", shown
    )
    assert "\n" not in shown  # the bar is redrawn in place
    run.steps(300)
    run.fire("on_train_end")
    assert "300/300" in terminal.text()


def test_on_a_terminal_evaluation_has_a_bar_and_its_result_a_line(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback)
    run.fire("on_train_begin")
    run.steps(40)
    run.evaluate([0] * 5, 5)
    shown = terminal.text()
    assert "evaluation:   0%" in shown and "0/5" in shown
    assert re.search(rf"(^|[\r\n]|\x1b\[A){re.escape(EVAL_LINE)}\r\n", shown)
    callback = run.handler.callbacks[1]
    assert callback.prediction_bar is None and callback.training_bar is not None
    run.fire("on_log", {"train_runtime": 75.0})
    run.fire("on_train_end")
    assert "step 40/300  train time 1 min 15 s" in terminal.text()
    assert callback.training_bar is None


def test_a_loader_without_length_has_no_evaluation_bar(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback)
    run.fire("on_train_begin")
    run.evaluate(iter([0] * 5), 5)
    assert "evaluation" not in terminal.text()
    run.fire("on_train_end")


def test_prediction_alone_has_a_bar_that_is_closed(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback)
    run.handler.eval_dataloader = [0] * 2
    run.fire("on_prediction_step")
    run.fire("on_prediction_step")
    assert "0/2" in terminal.text()
    run.fire("on_predict", {})
    assert run.handler.callbacks[1].prediction_bar is None


def test_a_resumed_run_starts_where_it_stands(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback, step=150)
    run.fire("on_train_begin")
    assert " 50%|" in terminal.text()
    run.steps(152)
    assert run.handler.callbacks[1].training_bar.n == 152
    run.fire("on_train_end")


def test_a_run_after_one_that_was_interrupted_starts_anew(open_terminal: Callable[..., Terminal]) -> None:
    open_terminal()
    run = Run(ProgressCallback)
    run.fire("on_train_begin")
    run.steps(10)
    interrupted = run.handler.callbacks[1].training_bar
    run.state.global_step = 0
    run.fire("on_train_begin")
    assert interrupted.disable and run.handler.callbacks[1].training_bar.n == 0
    run.fire("on_train_end")


def test_tqdm_can_be_switched_off_on_a_terminal(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback, disable_tqdm=True)
    run.fire("on_train_begin")
    run.steps(40)
    run.fire("on_log", TRAIN_LOGS)
    run.evaluate([0] * 3, 3)
    run.fire("on_train_end")
    assert terminal.text().split("\r\n") == [TRAIN_LINE, EVAL_LINE, ""]


def test_a_terminal_without_lines_gets_lines(open_terminal: Callable[..., Terminal]) -> None:
    tiny = open_terminal(lines=0, columns=0)  # a container without a window: tqdm would show nothing at all
    run = Run(ProgressCallback, step=40)
    run.fire("on_train_begin")
    run.fire("on_log", TRAIN_LOGS)
    assert tiny.text() == TRAIN_LINE + "\r\n"


def test_only_the_first_process_shows_anything(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback, PrinterCallback, is_world_process_zero=False, is_local_process_zero=False)
    run.fire("on_train_begin")
    run.steps(40)
    run.fire("on_log", TRAIN_LOGS)
    run.evaluate([0] * 3, 3)
    run.fire("on_train_end")
    assert terminal.text() == ""


def test_the_printer_speaks_once_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    logs = dict(TRAIN_LOGS, total_flos=1e18)
    run = Run(PrinterCallback, step=40, is_world_process_zero=False, is_local_process_zero=True)
    run.fire("on_log", logs)
    run.fire("on_log", {})
    assert capsys.readouterr().out == TRAIN_LINE + "\n"
    assert "total_flos" in logs  # the logs belong to the loop


def test_long_strings_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(ProgressCallback(max_str_len=5), step=40)
    run.fire("on_log", {"sample": "abcdefgh"})
    assert capsys.readouterr().out == "step 40/300  sample abcde... (8 characters)\n"

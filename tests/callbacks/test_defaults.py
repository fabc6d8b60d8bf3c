"""What the progress callbacks print on terminals and elsewhere."""

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
from typing import Any

import pytest

from ds_trainer.callbacks import defaults
from ds_trainer.callbacks.defaults import DefaultFlowCallback, PrinterCallback, ProgressCallback
from ds_trainer.callbacks.protocol import CallbackHandler
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from tests.callbacks.test_default_flow import flow_args


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
    "tokens_per_second": 12_345.0, "memory_gb": 0.81
}  # fmt: skip
TRAIN_LINE = "step 40/300  epoch 0.13  loss 2.314  grad norm 0.84  lr 2.9e-03  12.3k tok/s  0.81 GB"
REMAINING = r"  ETA [\d.]+ s"
TIMED_LINE = re.escape(TRAIN_LINE) + REMAINING
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


def test_without_a_terminal_each_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(ProgressCallback)
    run.fire("on_train_begin")
    run.steps(40)
    run.fire("on_log", TRAIN_LOGS)
    run.evaluate([0] * 3, 3)
    run.fire("on_log", {"train_runtime": 75.0, "train_loss": 2.5})
    run.fire("on_train_end")
    shown = capsys.readouterr()
    first, second, *others = shown.out.splitlines()
    assert re.fullmatch(TIMED_LINE, first)
    assert re.fullmatch(re.escape(EVAL_LINE) + REMAINING, second)
    assert others == ["step 40/300  train time 1 min 15 s  train loss 2.500"]
    assert shown.err == ""


def test_times_of_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The remaining time includes evaluations and saves. A step's log with train_runtime is no summary."""
    now = 1000.0
    monkeypatch.setattr(defaults.time, "monotonic", lambda: now)
    run = Run(ProgressCallback, step=100)  # resumed at 100
    run.fire("on_train_begin")
    for step in range(100, 110):
        now += 0.5
        run.steps(step + 1)
    run.fire("on_log", {"loss": 1.0, "step_seconds": 0.5})
    now += 10.0
    run.evaluate([0], 1)
    now += 5.0
    run.fire("on_save")
    for step in range(110, 120):
        now += 0.25
        run.steps(step + 1)
    counted = {"loss": 1.0, "step_seconds": 0.25, "train_runtime": 6.0}  # with include_num_input_tokens_seen
    run.fire("on_log", counted)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 110/300  loss 1.000  ETA 1 min 35 s"
    assert lines[1].endswith("eval time 1.50 s  ETA 4 min 45 s")
    # 22.5 s for 20 steps, so 202.5 s for the other 180
    assert lines[2] == "step 120/300  loss 1.000  train time 6.00 s  ETA 3 min 22 s"
    run.state.global_step = 300
    run.fire("on_log", {"loss": 1.0})
    assert "ETA" not in capsys.readouterr().out


def test_lines_reach_a_pipe_at_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.txt"
    with open(path, "w", encoding="utf-8") as stream:  # a file is buffered by blocks
        monkeypatch.setattr(sys, "stdout", stream)
        for callback in (ProgressCallback, PrinterCallback):
            run = Run(callback, step=39)
            run.fire("on_train_begin")
            run.steps(40)
            run.fire("on_log", TRAIN_LOGS)
            assert re.fullmatch(TIMED_LINE, path.read_text().splitlines()[-1])
        assert len(path.read_text().splitlines()) == 2
        monkeypatch.undo()


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_each_log_is_a_line_above_the_bar(open_terminal: Callable[..., Terminal], columns: int) -> None:
    terminal = open_terminal(columns=columns)
    run = Run(ProgressCallback)
    run.fire("on_train_begin")
    assert "0/300" in terminal.text()
    run.steps(40)
    terminal.text()
    for _ in range(2):
        run.fire("on_log", TRAIN_LOGS)
    shown = terminal.text()
    lines = re.findall(rf"(?:^|[\r\n])({TIMED_LINE}|{re.escape(TRAIN_LINE)}[^\r\n]*)\r\n", shown)
    assert len(lines) == 2  # complete, whatever the width
    bar = shown.split("\r")[-1]
    found = re.fullmatch(
        r" 13%\|(.*)\| 40/300 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+(?:step/s|s/step), loss 2.314\](?:\x1b\[A)?", bar
    )
    assert found is not None and len(found[1]) >= columns - 65  # room for the bar itself, and nothing truncated
    assert len(bar.removesuffix("\x1b[A")) <= columns
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
    assert re.search(rf"(^|[\r\n]|\x1b\[A){re.escape(EVAL_LINE)}{REMAINING}\r\n", shown)
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


def test_prediction_has_its_own_progress_bar(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback)
    run.handler.eval_dataloader = [0] * 2
    run.fire("on_prediction_step")
    run.fire("on_prediction_step")
    assert "0/2" in terminal.text()
    run.fire("on_predict", {})
    assert run.handler.callbacks[1].prediction_bar is None


def test_the_bar_of_a_resumed_run_starts_at_its_step(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback, step=150)
    run.fire("on_train_begin")
    assert " 50%|" in terminal.text()
    run.steps(152)
    assert run.handler.callbacks[1].training_bar.n == 152
    run.fire("on_train_end")


def test_a_run_after_an_interrupted_one_has_a_new_bar(open_terminal: Callable[..., Terminal]) -> None:
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
    first, *others = terminal.text().split("\r\n")
    assert re.fullmatch(TIMED_LINE, first)
    assert re.fullmatch(re.escape(EVAL_LINE) + REMAINING, others[0]) and others[1:] == [""]


def test_a_terminal_without_size_gets_log_lines(open_terminal: Callable[..., Terminal]) -> None:
    tiny = open_terminal(lines=0, columns=0)  # a container without a window: tqdm would show nothing at all
    run = Run(ProgressCallback, step=39)
    run.fire("on_train_begin")
    run.steps(40)
    run.fire("on_log", TRAIN_LOGS)
    assert re.fullmatch(TIMED_LINE + "\r\n", tiny.text())


def test_only_the_first_process_shows_anything(open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal()
    run = Run(ProgressCallback, PrinterCallback, is_world_process_zero=False, is_local_process_zero=False)
    run.fire("on_train_begin")
    run.steps(40)
    run.fire("on_log", TRAIN_LOGS)
    run.evaluate([0] * 3, 3)
    run.fire("on_train_end")
    assert terminal.text() == ""


def test_the_printer_writes_once_per_machine(capsys: pytest.CaptureFixture[str]) -> None:
    logs = dict(TRAIN_LOGS, total_flos=1e18)
    run = Run(PrinterCallback, step=40, is_world_process_zero=False, is_local_process_zero=True)
    run.fire("on_log", logs)
    run.fire("on_log", {})
    assert capsys.readouterr().out == TRAIN_LINE + "\n"
    assert "total_flos" in logs  # the logs belong to the loop


def test_long_strings_are_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(ProgressCallback(max_str_len=5), step=40)
    run.fire("on_log", {"sample": "abcdefgh"})
    assert capsys.readouterr().out == "step 40/300  sample abcde... (8 characters)\n"

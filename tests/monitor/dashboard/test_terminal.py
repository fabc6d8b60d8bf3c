"""The command on a real pseudo-terminal, and without a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ds_trainer.cli.main import main
from tests.monitor.report.example_run import example_run


def write_run(directory: Path, steps: int) -> None:
    """A run of this process, which lives."""
    import psutil

    directory.mkdir(exist_ok=True)
    began = psutil.Process().create_time()
    process = {"process_started": began, "pid": os.getpid(), "host": os.uname().nodename}
    run = {"step": 0, "summary": {"max_steps": 50}, "run_name": "live"}
    start = {"event": "start", "time": time.time(), **process, **run}
    (directory / "run_history.jsonl").write_text(json.dumps(start) + "\n")
    records = [{"step": step, "time": 2.0 * step, "loss": 3.0 / step} for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


class Screen:
    """``ds-trainer`` on a pseudo-terminal."""

    def __init__(self, words: list[str], columns: int, lines: int) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        command = [sys.executable, "-m", "ds_trainer", *words]

        def heed_ctrl_c() -> None:  # a shell lets the processes that it starts in the background ignore it
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=heed_ctrl_c
        )
        os.close(slave)
        self.text = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, words: str, seconds: float = 60.0) -> None:
        self.wait_until(lambda text: words in text, seconds)

    def wait_until(self, holds: Callable[[str], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds(self.text):
            assert time.monotonic() < deadline, self.text[-3000:]
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self._master, 1 << 16).decode(errors="replace")
                except OSError:  # the other side is closed
                    assert holds(self.text), self.text[-3000:]
                    return

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def last_frame(text: str) -> list[str]:
    """Lines of the last frame that is on the screen as a whole; empty: there is none yet."""
    frame = text.rpartition("\x1b[J")[0].rpartition("\x1b[H")[2]
    # The terminal adds a carriage return to each line feed.
    return [line.rstrip("\r") for line in frame.replace("\x1b[K", "").split("\n")] if frame else []


def test_the_screen_follows_the_run_and_the_size_of_the_terminal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, 10)
    screen = Screen(["dashboard", str(run), "--refresh", "0.05"], 100, 30)
    try:
        screen.wait_for("step 10/50")
        screen.wait_for("ETA 1 min 20 s")  # 2 s a step
        assert "live: running" in screen.text and "\x1b[?1049h" in screen.text
        write_run(run, 20)
        screen.wait_for("step 20/50")
        screen.text = ""
        screen.resize(40, 12)

        def fits(text: str) -> bool:  # frames of the former size may still be under way
            shown = last_frame(text)
            return bool(shown) and len(shown) <= 11 and max(map(len, shown)) <= 39

        screen.wait_until(fits)
        screen.wait_until(lambda text: "step 20/50" in "".join(last_frame(text)))
        assert fits(screen.text)
        with open(run / "run_history.jsonl", "a") as stream:
            stream.write(
                json.dumps({"event": "end", "time": time.time(), "step": 20, "outcome": "failed", "error": "X"}) + "\n"
            )
        screen.wait_for("live: failed")
        screen.wait_for("\x1b[?1049l")
        assert screen.process.wait(timeout=30) == 0
    finally:
        screen.close()


def test_ctrl_c_ends_the_view_and_restores_the_terminal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, 3)
    screen = Screen(["dashboard", str(run), "--refresh", "0.05"], 80, 24)
    try:
        screen.wait_for("step 3/50")
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("\x1b[?25h\x1b[?1049l")
        assert screen.process.wait(timeout=30) == 0
    finally:
        screen.close()


def test_without_a_terminal_one_plain_snapshot_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(example_run(tmp_path / "chat-8b"))]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "chat-8b: finished" in text and "grad norm" in text
    (tmp_path / "empty").mkdir()
    assert main(["dashboard", str(tmp_path / "empty")]) == 0  # the run may begin later
    assert "waiting for metrics.jsonl" in capsys.readouterr().out


def test_bad_arguments_end_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        ([str(tmp_path / "none")], "is not a directory"),
        ([str(tmp_path), "--refresh", "0"], "--refresh 0.0 must be a positive number"),
    ):
        assert main(["dashboard", *argv]) == 2
        assert words in capsys.readouterr().err


RECIPE = """
model:
  architecture: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
                 num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64}
data: {train: [FOLDER/*.txt], tokenizer: bytes, sequence_length: 32}
arguments: {output_dir: FOLDER/out, max_steps: 100000, logging_steps: 1, self_test: never, save_strategy: steps,
            save_steps: 50000, use_cpu: true}
"""


@pytest.mark.extended
def test_a_training_with_its_dashboard_stops_by_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A run and its dashboard. " * 200)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    screen = Screen(["train", str(recipe), "--dashboard"], 100, 30)
    try:
        screen.wait_for("/100,000", 200)
        screen.wait_for("grad norm")
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("Stopping the run")
        screen.wait_for("The last lines of")
        screen.wait_for("Stopped at step")
        assert screen.process.wait(timeout=60) == 75
    finally:
        trainings = psutil.Process(screen.process.pid).children() if screen.process.poll() is None else []
        screen.close()
        for training in trainings:  # of a test that failed: it has a session of its own
            training.kill()
    assert (tmp_path / "out" / "report.html").exists()

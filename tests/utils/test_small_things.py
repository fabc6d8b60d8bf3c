"""Errors, files, seeds and sizes."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_trainer.utils import files
from ds_trainer.utils.errors import ConfigError, did_you_mean, listed
from ds_trainer.utils.files import read_json, read_user_file, write_json, write_text_atomic
from ds_trainer.utils.printable import one_line, printable
from ds_trainer.utils.seeds import random_state, restore_random_state, seed_this_process, set_seed
from ds_trainer.utils.units import parse_size, parse_tokens


def test_one_problem_is_a_sentence_and_several_are_numbered() -> None:
    assert str(ConfigError("a is wrong.")) == "a is wrong."
    assert str(ConfigError(["a.", "b."])) == "2 problems:\n  1. a.\n  2. b."


def test_a_list_of_a_thousand_names_is_short() -> None:
    assert listed(range(3)) == "0, 1, 2" and listed([]) == ""
    assert listed(range(2000), 2) == "0, 1 and 1,998 more"
    assert listed(["a", "b", "c"], 2, "; ") == "a; b; and 1 more" and listed(["a.", "b."], 1, " ") == "a. and 1 more"


def test_nearest_name() -> None:
    assert did_you_mean("learning_rat", ["seed", "learning_rate"]) == " Did you mean 'learning_rate'?"
    assert did_you_mean("xyz", ["seed"]) == ""
    assert did_you_mean("lr", ["lora", "learning_rate"]) == " Did you mean 'learning_rate'?"
    assert did_you_mean("--lr", ["--help", "--arguments.learning_rate"]) == " Did you mean '--arguments.learning_rate'?"


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    write_json(target, {"a": 1})
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(target, "\ud800")
    assert read_json(target) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]
    assert json.loads(target.read_text()) == {"a": 1}


def test_a_file_system_that_cannot_flush_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """``/proc`` is one: the kernel refuses with EINVAL. A disk that failed is still an error."""
    monkeypatch.setattr(files, "_cannot_flush", False)
    with pytest.raises(OSError, match="Invalid argument"), open("/proc/self/status", "rb") as stream:
        os.fsync(stream.fileno())
    with caplog.at_level("WARNING", "ds_trainer"):
        monkeypatch.setattr(logging.getLogger("ds_trainer"), "propagate", True)
        files.flush_path("/proc/self")
        files.flush_path("/proc/self/status")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "A file system cannot flush files or directories to its disk (fsync"
    ]

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        files.flush_path("/proc/self")


def test_random_state_can_be_saved_without_pickles(tmp_path: Path) -> None:
    set_seed(3)
    torch.save(random_state(), tmp_path / "state.pt")
    random_draws = (random.random(), np.random.rand(), torch.rand(()))
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (random.random(), np.random.rand(), torch.rand(())) == random_draws
    assert random.random() != random_draws[0]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("200MiB", 200 * 2**20), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "5 apples", "0GB"])
def test_malformed_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "tokens"), [("64K", 65536), ("1M", 2**20), ("1.5 m", 3 * 2**19), ("131072", 131072), ("4_096", 4096)]
)
def test_lengths_in_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "-1K", "64KB", "64 kilo", "0", "1.5", "1e6", "1..5K"])
def test_malformed_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of tokens"):
        parse_tokens(text)


def test_seed_this_process_matches_set_seed() -> None:
    def random_draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    set_seed(3**33)
    wanted = random_draws()
    seed_this_process(3**33)
    assert random_draws() == wanted


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "\x9b1m", "\r", "\b", "\u202e", "\u2028", "\u2066", "\ud800", "\x7f", "\ufeff"]
)
def test_what_controls_a_terminal_is_escaped(text: str) -> None:
    for clean in (printable(f"a{text}b\n\tc"), str(ConfigError(f"a{text}b\n\tc"))):
        assert text not in clean and clean.startswith("a\\") and clean.endswith("b\n\tc")
    assert one_line(f"{text}\n\t").isprintable()
    assert printable("é 漢字 😀 ⟦x⟧\n\t") == "é 漢字 😀 ⟦x⟧\n\t"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fifo", "is a named pipe"),
        ("/dev/zero", "is a device"),
        ("folder", "is a directory"),
        ("loop", "cannot be read"),
        ("large", "is larger than 16 MiB"),
        ("latin", "is not UTF-8 text"),
        ("zeros", "has a NUL byte"),
        ("gone", "does not exist"),
        ("a" * 5000, "cannot be read"),
        ("a\0b", "cannot be read"),
        ("~nosuchuser/x", "does not exist"),
    ],
)
def test_a_file_that_is_no_text_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    with open("large", "wb") as file:
        file.truncate(10 * 2**30)  # without blocks
    Path("latin").write_bytes("é".encode("latin-1"))
    Path("zeros").write_bytes(b"a\0b")
    with pytest.raises(ConfigError, match=reason) as caught:
        read_user_file(name, f"The file {name!r}", "text file")
    assert len(str(caught.value)) < 600


def test_directories_of_running_processes_outlive_a_clock_that_is_set(tmp_path: Path, monkeypatch: Any) -> None:
    """By a day forward or an hour back; of other hosts, only the clock of the file system counts."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, day = socket.gethostname(), 24 * 3600
    ages = {f"{here}.{os.getpid()}": 2 * day, f"{here}.{ended.pid}": 0, "other.7": day // 2, "other.8": 2 * day}
    for jump in (day, -3600):
        for name, age in ages.items():
            path = tmp_path / f".out.{name}.00000000.partial"
            path.mkdir(exist_ok=True)
            os.utime(path, (time.time() - age,) * 2)
        now = time.time() + jump
        monkeypatch.setattr(time, "time", lambda now=now: now)
        own = files.new_partial(tmp_path / "out")
        monkeypatch.undo()
        left = {path.name for path in tmp_path.iterdir()} - {own.name}
        assert left == {f".out.{name}.00000000.partial" for name in (f"{here}.{os.getpid()}", "other.7")}
        own.rmdir()

"""A process that is killed at any point of a save leaves a directory from which the next run can resume.

A forked child runs the real protocol and kills itself before one of its file operations, or in the middle of a write;
the parent then does what the next run does. With ``power``, the machine fails instead of the process: what was not
flushed is lost, contents as well as names. docs/explanation/checkpoints.md lists the number of crash points.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint
from ds_trainer.checkpoint.protocol.retention import Retention
from tests.support.checkpoints import bytes_of, resume, save

DOCS = Path(__file__).parents[3] / "docs" / "explanation" / "checkpoints.md"
OPERATIONS = (
    *("make_directory", "open_new", "open_shared", "resize", "write", "write_at", "flush", "close"),
    *("flush_file", "rename", "remove_file"),
)
_MAX_WRITE = 8192  # bytes: a file takes several writes


class Killer:
    """Counts file operations, and kills the process before one of them.

    Args:
        at: number of the operation; None only counts.
        power: simulate a power failure: what was not flushed is lost.
    """

    def __init__(self, at: int | None, power: bool) -> None:
        self.at, self.power = at, power
        self.count = 0
        self._unflushed: dict[int, int] = {}  # a duplicate by descriptor, which stays open
        self._lost: list[int] = []
        self._names: list[Path] = []  # of new files in directories that were not flushed
        self._renames: list[tuple[Path, Path]] = []

    def install(self) -> None:
        for name in (*OPERATIONS, "remove_directory"):
            setattr(disk, name, self._before(name, getattr(disk, name)))

    def _before(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self._die()
            if name == "write":
                return function(arguments[0], arguments[1][:_MAX_WRITE])
            if name == "write_at":
                return function(arguments[0], arguments[1][:_MAX_WRITE], arguments[2])
            result = function(*arguments)
            if name in ("open_new", "open_shared"):
                self._unflushed[result] = os.dup(result)
            if name == "open_new":
                self._names.append(arguments[0])
            elif name == "flush":
                self._unflushed.pop(arguments[0], None)
            elif name == "close" and arguments[0] in self._unflushed:
                self._lost.append(self._unflushed.pop(arguments[0]))  # closing flushes nothing
            elif name == "rename":
                source, target = arguments
                self._renames.append((source, target))
                self._names = [target / n.relative_to(source) if source in (n, *n.parents) else n for n in self._names]
            elif name == "flush_file":
                self._renames = [pair for pair in self._renames if pair[0].parent != arguments[0]]
                self._names = [path for path in self._names if path.parent != arguments[0]]
            return result

        return operation

    def _die(self) -> None:
        if self.power:
            for descriptor in (*self._unflushed.values(), *self._lost):
                os.ftruncate(descriptor, 0)
            for path in self._names:
                path.unlink(missing_ok=True)
            for source, target in reversed(self._renames):
                if target.exists():
                    os.rename(target, source)
        os.kill(os.getpid(), signal.SIGKILL)


def run_child(work: Callable[[], Any], at: int | None, power: bool = False) -> int | None:
    """Run ``work`` in a forked process that is killed before operation ``at``.

    Returns:
        None if the process was killed, else the number of file operations.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            killer = Killer(at, power)
            killer.install()
            work()
            os.write(writing, str(killer.count).encode())
        finally:
            os._exit(0)
    os.close(writing)
    count = os.read(reading, 100)
    os.close(reading)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    return int(count)


def first(directory: Path) -> None:
    save(directory, 2)


def next_one(directory: Path) -> None:
    save(directory, 4)


def write_same_step_again(directory: Path) -> None:
    save(directory, 2, run=1)


def with_retention(directory: Path) -> None:
    save(directory, 6, Retention(keep=1))


def tidied(directory: Path) -> None:
    CheckpointDirectory(directory).tidy()


def _nothing(directory: Path) -> None:
    pass


def _one(directory: Path) -> None:
    save(directory, 2)


def _two(directory: Path) -> None:
    save(directory, 2)
    save(directory, 4)


def _left_over(directory: Path) -> None:
    """The leftovers of killed processes: one was replacing a checkpoint, one writing, one removing another."""
    _two(directory)
    os.rename(directory / "checkpoint-4", directory / ".checkpoint-4.0123abcd.old")
    save(directory, 6)
    os.rename(directory / "checkpoint-6", directory / ".checkpoint-6.0123abcd.partial")
    os.rename(directory / "checkpoint-2", directory / ".checkpoint-2.0123abcd.removed")


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """An empty directory in memory if possible: flushes are free there, and this test simulates their effect anyway."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


# Setup, the interrupted action, and the step that a run must at least resume from (0: no checkpoint exists yet).
SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], int]] = {
    "the first checkpoint": (_nothing, first, 0),
    "another checkpoint": (_one, next_one, 2),
    "the same step again": (_one, write_same_step_again, 2),
    "another checkpoint, with retention": (_two, with_retention, 4),
    "cleaning up leftovers": (_left_over, tidied, 4),
}
WRITTEN = {first: (2, 0), next_one: (4, 0), write_same_step_again: (2, 1), with_retention: (6, 0), tidied: (4, 0)}


def crash_points(scenario: str, directory: Path) -> int:
    before, act, _ = SCENARIOS[scenario]
    directory.mkdir()
    before(directory)
    count = run_child(lambda: act(directory), None)
    assert count is not None
    return count


@pytest.mark.cases(1, "another checkpoint-power lost", "the same step again-power lost")
@pytest.mark.parametrize("power", [False, True], ids=["process killed", "power lost"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_crash_leaves_a_complete_checkpoint(scenario: str, power: bool, quick_path: Path) -> None:
    before, act, least = SCENARIOS[scenario]
    step, run = WRITTEN[act]
    resumed: list[tuple[int, int]] = []
    for at in range(1, crash_points(scenario, quick_path / "count") + 1):
        directory = quick_path / str(at)
        directory.mkdir()
        before(directory)
        assert run_child(lambda directory=directory: act(directory), at, power) is None  # type: ignore[misc]
        if least == 0:
            try:
                checkpoint, files = resume(directory)
            except BrokenCheckpoint as error:
                assert "It has no checkpoint-N directory." in str(error)
                assert not any(directory.glob("[!l]*")), "leftovers"
                continue
        else:
            checkpoint, files = resume(directory)
        found_run = run if checkpoint.manifest.generation > 1 or least == 0 else 0
        assert files == {name: bytes_of(checkpoint.manifest.step, name, found_run) for name in files}
        assert checkpoint.manifest.step in (least, step)
        resumed.append((checkpoint.manifest.step, checkpoint.manifest.generation))
        assert not list(directory.glob(".*")), "leftovers"
        save(directory, 8)  # the next run saves
        assert resume(directory)[0].manifest.step == 8
    assert resumed == sorted(resumed, key=lambda pair: pair[1])  # once the new checkpoint exists, it stays
    if act is not tidied:
        assert resumed[-1][0] == step


def test_documented_counts_are_right(quick_path: Path) -> None:
    counts = {scenario: crash_points(scenario, quick_path / str(index)) for index, scenario in enumerate(SCENARIOS)}
    text = DOCS.read_text(encoding="utf-8")
    for scenario, count in counts.items():
        row = re.search(rf"^\| {scenario} \| (\d+) \| (\d+) \|", text, re.MULTILINE)
        assert row is not None and row[1] == row[2] == str(count), (scenario, count)
    assert sum(counts.values()) * 2 >= 200


@pytest.mark.cases(1)
@pytest.mark.parametrize("broken", ["flush", "flush_file", "order"])
def test_a_broken_protocol_is_detected(broken: str, quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without flushing files or directories, or if renamed too early, some crash loses a checkpoint."""
    if broken == "order":
        monkeypatch.setattr(CheckpointDirectory, "begin", _begin_with_the_final_name)
        monkeypatch.setattr(CheckpointDirectory, "publish", lambda self, partial, step: None)
    else:
        monkeypatch.setattr(disk, broken, lambda what: None)
    lost = 0
    before, act, _ = SCENARIOS["the same step again"]
    monkeypatch.setattr(Killer, "_before", _before_unflushed if broken != "order" else Killer._before)
    for at in range(1, crash_points("the same step again", quick_path / "count") + 2):
        directory = quick_path / str(at)
        directory.mkdir()
        before(directory)
        run_child(lambda directory=directory: _act_and_die(act, directory), at, power=True)  # type: ignore[misc]
        try:
            resume(directory)
        except BrokenCheckpoint:
            lost += 1
    assert lost > 0


def _begin_with_the_final_name(self: CheckpointDirectory, step: int) -> Path:
    import shutil

    path = self.path / f"checkpoint-{step}"
    shutil.rmtree(path, ignore_errors=True)
    disk.make_directory(path)
    return path


def _act_and_die(act: Callable[[Path], None], directory: Path) -> None:
    act(directory)


_original_before = Killer._before


def _before_unflushed(self: Killer, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """As the Killer's, for a protocol whose flushes have no effect."""
    return _original_before(self, f"{name} without effect" if name.startswith("flush") else name, function)

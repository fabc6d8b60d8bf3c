"""DeepSpeed's operators for the tests: compiled for minutes, beside the tests that do without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import fcntl, os, pathlib, threading, time
def end_with(parent):
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, 9)  # the tests were killed: so are the compilers
threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
os.nice(10)  # the tests that need operators come last
folder = pathlib.Path({folder!r})
building = (folder / "building").open("w")
fcntl.flock(building, fcntl.LOCK_EX)  # one at a time; the next one finds it built
for lock in folder.rglob("lock"):  # of a build that was killed; every later one would wait for it
    lock.unlink()
os.environ.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR={folder!r}, MAX_JOBS="2")
from deepspeed.accelerator import get_accelerator
for name in {names!r}:
    get_accelerator().create_op_builder(name).load(verbose=False)
"""


class OperatorBuild:
    """A build in the background, into a folder that is kept between test runs.

    Args:
        folder: for the compiled operators and nothing else.
        names: of DeepSpeed's builders.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder = folder
        self._log = folder / f"build-{os.getpid()}.log"
        self._output = self._log.open("w")
        code = CODE.format(folder=str(folder), names=names)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def folder(self) -> str:
        """The folder, when the build is done. Raises AssertionError with its output where it failed."""
        code = self._process.wait(timeout=900)
        assert code == 0, self._log.read_text()[-3000:]
        return str(self._folder)

    def end(self) -> None:
        """Stop a build that is no longer needed."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the compilers too
            self._process.wait()
        self._output.close()
        self._log.unlink(missing_ok=True)


OPERATORS = pytest.StashKey[OperatorBuild]()

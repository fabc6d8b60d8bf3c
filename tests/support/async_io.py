"""DeepSpeed's async_io operator for the tests: compiled for minutes, beside the tests that do without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os
os.environ.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR={folder!r}, MAX_JOBS="2")
from deepspeed.ops.op_builder import AsyncIOBuilder
AsyncIOBuilder().load(verbose=False)
"""


class AsyncIOBuild:
    """A build in the background, into a folder that is kept between test runs.

    Args:
        folder: for the compiled operator and nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for lock in folder.rglob("lock"):  # of a build that was killed; every later one would wait for it
            lock.unlink()
        self._output = (folder / "build.log").open("w")
        code = CODE.format(folder=str(folder))
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=self._output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )

    def folder(self) -> str:
        """The folder, when the build is done. Raises AssertionError with its output where it failed."""
        code = self._process.wait(timeout=900)
        assert code == 0, (self._folder / "build.log").read_text()[-3000:]
        return str(self._folder)

    def end(self) -> None:
        """Stop a build that nobody waits for any more."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._output.close()


ASYNC_IO = pytest.StashKey[AsyncIOBuild]()

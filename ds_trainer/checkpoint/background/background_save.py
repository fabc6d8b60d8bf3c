"""Runs a save in a thread while training continues, and lets it finish before the process ends."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

from ds_trainer.checkpoint.background.snapshot import Snapshot
from ds_trainer.checkpoint.background.store_barrier import StoreBarrier
from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile
from ds_trainer.checkpoint.protocol.writer_group import Communicator
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.threads import new_thread

logger = get_logger(__name__)

T = TypeVar("T")

THREAD_NAME = "ds_trainer-save"
_POLL_SECONDS = 0.1
_ABANDON_SECONDS = 1.0  # once other ranks have exited: time to read their last values in the store


class BackgroundTask(Generic[T]):
    """A function that runs in its own thread, which keeps the process alive until it is done.

    Args:
        function: the work.

    Attributes:
        ended: ``time.perf_counter()`` when the function returned or raised; infinity before.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.ended = math.inf
        self._result: T
        self._failure: BaseException | None = None
        # Not a daemon thread: the process waits for it at exit.
        self._thread = new_thread(self._run, name=THREAD_NAME, daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # raised again by result()
            self._failure = error
        del self._function  # often a method of this object: with it, the memory of a save would wait for the collector
        self.ended = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether the function has returned or raised."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the function has ended, for at most ``timeout`` seconds. Returns whether it has ended."""
        self._thread.join(timeout)
        return self.done

    def result(self) -> T:
        """Wait for the function and return its result.

        Raises:
            BaseException: what the function raised.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._result


class BackgroundSave(BackgroundTask[Path]):
    """A checkpoint that is being written by a thread.

    Args:
        snapshot: the state to write.
        write: writes files, given a communicator for the threads of all ranks, and returns the checkpoint's path.
        barrier: that communicator.
    """

    def __init__(
        self, snapshot: Snapshot, write: Callable[[Iterable[CheckpointFile], Communicator], Path], barrier: StoreBarrier
    ) -> None:
        self._snapshot = snapshot
        self._write = write
        self._barrier = barrier
        super().__init__(self._save)

    def _save(self) -> Path:
        self._snapshot.copy_deferred()
        return self._write(self._snapshot.files(), self._barrier)

    def finish(self, timeout: float, ranks_have_exited: Callable[[], bool] = lambda: False) -> None:
        """Finish the save before the process ends. Other ranks may have exited, so waiting for them is limited.

        Args:
            timeout: seconds, for each wait for the other ranks.
            ranks_have_exited: polled; returns True once other ranks are known to have exited.

        Raises:
            BaseException: the exception of the save.
        """
        self._barrier.set_timeout(timeout)
        while not self.wait(_POLL_SECONDS):
            if ranks_have_exited():
                self._barrier.set_timeout(_ABANDON_SECONDS)
                break
        self.result()
        self._barrier.leave()


@contextmanager
def finish_before_sigterm(finish: Callable[[], None]) -> Iterator[None]:
    """Within the block, SIGTERM calls ``finish()`` and then ends the process, as it does without a handler.

    Does nothing if the process already handles SIGTERM, or outside the main thread, where Python allows no handlers.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process at once
        try:
            finish()
        except BaseException as error:
            logger.error("The save in progress failed while the process was being ended: %s", error)
        os.kill(os.getpid(), signal.SIGTERM)

    is_main = threading.current_thread() is threading.main_thread()
    installed = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if installed:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if installed and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

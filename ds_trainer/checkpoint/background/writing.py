"""One save at a time in a thread, while training goes on."""

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

from ds_trainer.checkpoint.background.meeting import Meeting
from ds_trainer.checkpoint.background.snapshot import Snapshot
from ds_trainer.checkpoint.protocol.contents import Content
from ds_trainer.checkpoint.protocol.sharing import Messages
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.threads import new_thread

logger = get_logger(__name__)

T = TypeVar("T")

THREAD = "ds_trainer-save"
_LOOK_SECONDS = 0.1
_HURRY_SECONDS = 1.0  # for what a rank that is gone said before


class BackgroundWork(Generic[T]):
    """A function that runs in a thread of its own, which keeps the process alive until it is done.

    Args:
        function: what is done.

    Attributes:
        ended: moment of ``time.perf_counter()`` at which it was done.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.ended = math.inf
        self._result: T
        self._failure: BaseException | None = None
        # Not a daemon: a process that ends waits for it.
        self._thread = new_thread(self._run, name=THREAD, daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # raised again by result()
            self._failure = error
        self.ended = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, but no longer than ``seconds``; whether it has."""
        self._thread.join(seconds)
        return self.done

    def result(self) -> T:
        """What the function returned; waits for it.

        Raises:
            BaseException: what the function raised.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._result


class BackgroundSave(BackgroundWork[Path]):
    """A checkpoint on its way to the disk.

    Args:
        snapshot: what is written.
        write: writes files, with this way of hearing from the other ranks, and returns the checkpoint's path.
        meeting: of the threads of all ranks.
    """

    def __init__(
        self, snapshot: Snapshot, write: Callable[[Iterable[Content], Messages], Path], meeting: Meeting
    ) -> None:
        self._snapshot = snapshot
        self._write = write
        self._meeting = meeting
        super().__init__(self._save)

    def _save(self) -> Path:
        self._snapshot.complete()
        return self._write(self._snapshot.files(), self._meeting)

    def finish(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Wait before the process ends; for other ranks, which may be gone, no longer than ``seconds``.

        Args:
            seconds: for each time that this rank waits for them.
            hurry: looked at meanwhile: whether it need not wait for them any more, as they are gone.

        Raises:
            BaseException: what the save failed with.
        """
        self._meeting.give_up_after(seconds)
        while not self.wait(_LOOK_SECONDS):
            if hurry():
                self._meeting.give_up_after(_HURRY_SECONDS)
                break
        self.result()
        self._meeting.leave()


@contextmanager
def ends_after(finish: Callable[[], None]) -> Iterator[None]:
    """For a block: SIGTERM ends the process, as it does without a handler, but only after ``finish()``.

    Where the process has a handler of its own, that stays in charge; so it is outside of the main thread, where Python
    allows no handlers.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whoever asks twice does not want to wait
        try:
            finish()
        except BaseException as error:
            logger.error("The save under way failed while the process was ended: %s", error)
        os.kill(os.getpid(), signal.SIGTERM)

    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if mine and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

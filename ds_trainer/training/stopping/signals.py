"""Counting the signals by which a person, a scheduler or a launcher asks a process to stop.

Python runs a handler when the main thread gets back to the interpreter, which it does not while it waits for another
rank in a collective. So the handlers here do nothing, and a thread counts what the C half of Python's signal module
writes to a file descriptor (:func:`signal.set_wakeup_fd`), whatever the main thread does.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from ds_trainer.utils.threads import new_thread

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
BURST_SECONDS = 1.0
"""A scheduler and the launchers below it each pass a signal on: what comes within this time is one request."""
LEAVING_SECONDS = 20.0


class SignalCounter:
    """Counts requests to stop while it is entered, and ends the process at the third.

    A signal is left alone where the process has a handler of its own, outside of the main thread (where Python allows
    no handlers), and where it ignores SIGINT, as jobs in the background do. An ignored SIGUSR1 is taken: launchers that
    would die of it are started with it ignored, and their ranks inherit that.

    Attributes:
        requests: signals so far; those of one burst count once.
        name: of the first one, as ``"SIGTERM"``; empty before.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.name = ""
        self._before: dict[int, Any] = {}
        self._last = -BURST_SECONDS
        self._wakeup = -1
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> SignalCounter:
        if threading.current_thread() is not threading.main_thread():
            return self
        taken = [number for number in SIGNALS if _is_free(number)]
        if not taken:
            return self
        reader, writer = self._sockets = socket.socketpair()
        writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        new_thread(self._listen, reader, name="ds_trainer-signals").start()
        for number in taken:
            before = signal.signal(number, _nothing)
            self._before[number] = signal.SIG_DFL if isinstance(before, _OnItsWay) else before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is _nothing:
                signal.signal(number, handler)
        if isinstance(error, SystemExit) and signal.SIGTERM in self._before:
            leaving = _OnItsWay()
            signal.signal(signal.SIGTERM, leaving)
            atexit.register(leaving.ignore)
        self._before = {}
        if self._sockets is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._sockets[1].close()  # the thread reads the end of the stream, and ends
            self._sockets = None

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(64):
                for number in numbers:
                    if number in self._before:
                        self._count(number)

    def _count(self, number: int) -> None:
        now = time.monotonic()
        if now - self._last < BURST_SECONDS:
            return
        self._last = now
        self.requests += 1
        if self.requests == 1:
            self.name = signal.Signals(number).name
        elif self.requests >= 3:
            print(
                f"ds_trainer: ended by the third signal ({signal.Signals(number).name}).", file=sys.stderr, flush=True
            )
            os._exit(128 + number)


def _nothing(number: int, frame: FrameType | None) -> None:
    """In the place of the default action, which would end the process."""


class _OnItsWay:
    """Handler of a process that is about to end with an exit code that says why: for a while nobody need end it.

    As soon as one rank has ended, launchers do that with the others, more than once.
    """

    def __init__(self) -> None:
        self._until = time.monotonic() + LEAVING_SECONDS

    def ignore(self) -> None:
        """The interpreter is about to end, which puts the default action in the place of every handler but this."""
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() > self._until:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _is_free(number: int) -> bool:
    """Whether nobody else handles the signal."""
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        return handler is signal.default_int_handler
    # A process that is still there after it was stopped trains again.
    if isinstance(handler, _OnItsWay) or handler is signal.SIG_DFL:
        return True
    return number == signal.SIGUSR1 and handler is signal.SIG_IGN


# A loading process that is forked must not report its own signals into its parent's pipe.
os.register_at_fork(after_in_child=lambda: _leave_to_parent())


def _leave_to_parent() -> None:
    if any(signal.getsignal(number) is _nothing for number in SIGNALS):
        signal.set_wakeup_fd(-1)

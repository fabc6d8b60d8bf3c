"""Count the signals by which a person, a scheduler or a launcher asks a process to stop.

Python runs a handler only when the main thread returns to the interpreter. It does not return while it waits for
another rank in a collective. So the handlers here do nothing. The C part of Python's signal module writes the number
of each signal to a file descriptor (:func:`signal.set_wakeup_fd`), and a thread counts them.
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
"""A scheduler and the launchers below it each forward a signal: all signals within this time are one request."""
EXIT_SECONDS = 20.0


class SignalCounter:
    """Context manager that counts requests to stop, and ends the process at the third.

    It does not replace handlers that the process has installed, nor an ignored SIGINT (background jobs ignore it). It
    does nothing outside of the main thread, where Python allows no handlers. It does replace an ignored SIGUSR1:
    launchers that SIGUSR1 would kill are started with the signal ignored, and their ranks inherit that.

    Attributes:
        requests: number of requests so far; signals in a burst count once.
        name: name of the first signal, such as ``"SIGTERM"``; empty before.
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
            self._before[number] = signal.SIG_DFL if isinstance(before, _ExitHandler) else before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is _nothing:
                signal.signal(number, handler)
        if isinstance(error, SystemExit) and signal.SIGTERM in self._before:
            exit_handler = _ExitHandler()
            signal.signal(signal.SIGTERM, exit_handler)
            atexit.register(exit_handler.ignore)
        self._before = {}
        if self._sockets is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._sockets[1].close()  # ends the thread: it reads the end of the stream
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
    """Replaces the default action, which would end the process."""


class _ExitHandler:
    """SIGTERM handler of a process that is about to exit. For a while it ignores the signal, to keep the exit code.

    As soon as one rank has ended, launchers send SIGTERM to the others, more than once.
    """

    def __init__(self) -> None:
        self._until = time.monotonic() + EXIT_SECONDS

    def ignore(self) -> None:
        """Ignore SIGTERM at interpreter exit, which restores the default action of all Python handlers."""
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() > self._until:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _is_free(number: int) -> bool:
    """Whether no other code handles the signal."""
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        return handler is signal.default_int_handler
    # An exit handler is left from an earlier training that was stopped in this process.
    if isinstance(handler, _ExitHandler) or handler is signal.SIG_DFL:
        return True
    return number == signal.SIGUSR1 and handler is signal.SIG_IGN


# A forked data loading process must not report its own signals through its parent's socket.
os.register_at_fork(after_in_child=lambda: _reset_wakeup_fd())


def _reset_wakeup_fd() -> None:
    if any(signal.getsignal(number) is _nothing for number in SIGNALS):
        signal.set_wakeup_fd(-1)

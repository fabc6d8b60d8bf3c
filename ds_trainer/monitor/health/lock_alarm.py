"""An alarm for a process in which C code holds the interpreter's lock, so that no thread of Python can speak.

Python's ``faulthandler`` waits in a thread of C and needs no lock: unless the alarm is put off in time, it writes the
stacks of all threads to standard error. There is one such alarm in a process: where a program uses
``faulthandler.dump_traceback_later`` itself, the later call wins.

A process that is forked while the alarm is armed hangs when it ends (CPython 3.11: it waits for a thread that it does
not have). So the alarm is taken off around every fork.
"""

from __future__ import annotations

import faulthandler
import os
import threading

_STANDARD_ERROR = 2
_lock = threading.Lock()
_armed = False
_looks_at_forks = False


def put_off(seconds: float) -> None:
    """Write all stacks to standard error in ``seconds``, unless this is called again before."""
    global _armed, _looks_at_forks
    with _lock:
        if not _looks_at_forks:
            os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release)
            _looks_at_forks = True
        faulthandler.dump_traceback_later(seconds, file=_STANDARD_ERROR)
        _armed = True


def take_off() -> None:
    """No alarm any more."""
    with _lock:
        _cancel()


def _cancel() -> None:
    global _armed
    if _armed:
        faulthandler.cancel_dump_traceback_later()
        _armed = False


def _before_fork() -> None:
    _lock.acquire()  # released on both sides, so that nobody arms it in between
    _cancel()

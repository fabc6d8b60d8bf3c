"""An alarm for a process in which C code holds the GIL, so that no Python thread runs.

Python's ``faulthandler`` waits in a C thread and needs no GIL: unless the alarm is rearmed in time, it writes the
stacks of all threads to standard error. A process has one such alarm: if a program calls
``faulthandler.dump_traceback_later`` too, the later call wins.

A process that is forked while the alarm is armed hangs at its exit (CPython 3.11: it waits for a thread that it does
not have). So the alarm is disarmed during every fork.
"""

from __future__ import annotations

import faulthandler
import os
import threading

_STANDARD_ERROR = 2
_lock = threading.Lock()
_armed = False
_watches_forks = False


def arm(seconds: float) -> None:
    """Write all stacks to standard error in ``seconds``, unless this is called again before then."""
    global _armed, _watches_forks
    with _lock:
        if not _watches_forks:
            os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release)
            _watches_forks = True
        faulthandler.dump_traceback_later(seconds, file=_STANDARD_ERROR)
        _armed = True


def disarm() -> None:
    """Cancel the alarm."""
    with _lock:
        _cancel()


def _cancel() -> None:
    global _armed
    if _armed:
        faulthandler.cancel_dump_traceback_later()
        _armed = False


def _before_fork() -> None:
    _lock.acquire()  # released on both sides, so that no thread arms it in between
    _cancel()

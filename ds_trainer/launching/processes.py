"""Process trees: parent-death signals, and ending all descendants. Some of it works on Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

import psutil

GRACE_SECONDS = 5.0
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def prepare_child(number: signal.Signals) -> None:
    """Have the kernel send signal ``number`` to this process when its parent dies. To be called just before an exec.

    SIGUSR1 is ignored: it would kill launchers, and Python processes that are still starting.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if _libc is not None:
        _libc.prctl(_SET_DEATH_SIGNAL, int(number))


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that they can be found and waited for."""
    if _libc is not None:
        _libc.prctl(_SET_CHILD_SUBREAPER, 1)


def end_descendants(grace: float = GRACE_SECONDS) -> int:
    """End all descendants of this process; returns how many were running."""
    return end_processes(psutil.Process().children(recursive=True), grace)


def processes_of_job(variable: str, job: str) -> list[psutil.Process]:
    """Other processes of this user on this machine with ``variable`` = ``job`` in their environment."""
    matching = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get(variable) == job:
                matching.append(process)
        except (psutil.Error, OSError):  # it has ended, or belongs to another user
            continue
    return matching


def end_processes(processes: Iterable[psutil.Process], grace: float = GRACE_SECONDS) -> int:
    """Send SIGTERM, and SIGKILL after ``grace`` seconds; wait until all have ended. Returns how many were running."""
    alive = [process for process in processes if _is_running(process)]
    for process in alive:
        _send(process, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(alive, timeout=grace)
    for process in stubborn:
        _send(process, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=grace)
    return len(alive)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


if (
    __name__ == "__main__"
):  # python -m ds_trainer.launching.processes VARIABLE VALUE: end_processes(processes_of_job(...))
    end_processes(processes_of_job(*sys.argv[1:3]))

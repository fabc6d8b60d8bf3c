"""Exit codes of a training run, and what each means for whoever started it: one table for every launcher."""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass
from enum import Enum

from ds_trainer.utils.errors import text_of

DONE = 0
FAILED = 1
CANNOT_WORK = 2
"""The request cannot work; a restart would fail again."""
NOTHING_FITS = 3
"""``ds-trainer plan``: no layout fits."""
FAULT = 74
"""A device, the network or another process failed: another start may cure it. (The value of ``EX_IOERR``.)"""
REQUEUE = 75
"""Stopped at a complete checkpoint by a signal or a time limit: restart it. (The value of ``EX_TEMPFAIL``.)"""
HUNG = 76
"""The watchdog ended a job that had stalled: restart it from its last checkpoint."""
STOPPED = 77
"""Stopped at a complete checkpoint at the request of a person: do not restart it."""
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
_SIGNAL, _OTHER = "128 + N", "other"


class Restart(Enum):
    """What follows an exit code, in the words of the documentation."""

    NEVER = "ends"
    ALWAYS = "restarts"
    AFTER_FAULT = "restarts as after a fault"


@dataclass(frozen=True)
class Code:
    """One row of the table: an exit code (text for several), what it means, and what follows."""

    code: int | str
    meaning: str
    restart: Restart


TABLE = (
    Code(CANNOT_WORK, "the request cannot work", Restart.NEVER),
    Code(STOPPED, "stopped at the request of a person", Restart.NEVER),
    Code(REQUEUE, "stopped at a checkpoint by a signal or a time limit", Restart.ALWAYS),
    Code(HUNG, "stalled, ended by the watchdog", Restart.AFTER_FAULT),
    Code(INTERRUPTED, "interrupted by a person (Ctrl-C)", Restart.NEVER),
    Code(_OTHER, "an error of the program: a Python error, too little GPU memory", Restart.NEVER),
    Code(
        FAULT, "a device, NCCL, gloo, the network, a file system or a data loader process failed", Restart.AFTER_FAULT
    ),
    Code(_SIGNAL, "ended by signal N: 134 abort (NCCL's watchdog), 139 segfault, 137 kill", Restart.AFTER_FAULT),
    Code(DONE, "done", Restart.NEVER),
)
"""In order of precedence, if ranks end with different codes; the last two kinds of fault have the same."""

_FAULTS = ("AcceleratorError", "DistBackendError", "DistNetworkError", "DistStoreError")
_FAULT_WORDS = (
    *("CUDA error", "NCCL error", "NCCL Error", "CUBLAS_STATUS_", "CUDNN_STATUS_EXECUTION_FAILED", "third_party/gloo"),
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *(") exited unexpectedly", ") is killed by signal"),  # a process of a data loader
)
_FAULT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTUNREACH)
# Errors of the program that come as one of the above.
_OWN_WORDS = (
    *("out of memory", "device-side assert", "no kernel image", "invalid device ordinal", "invalid argument"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE"),
)


def row_of(code: int) -> Code:
    """The row of :data:`TABLE` for an exit code."""
    exact = {row.code: row for row in TABLE}
    return exact.get(code) or exact[_SIGNAL if code > 128 else _OTHER]


def precedence(code: int) -> int:
    """Of several codes, the one with the smallest value here is that of the job; equal ones by time."""
    return TABLE.index(row_of(FAULT if row_of(code).code == _SIGNAL else code))


def signal_name(code: int) -> str:
    """The name of the signal that has ended a process with this exit code; empty if none has."""
    return signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else ""


def code_of(error: BaseException) -> int:
    """The exit code of a process that ends with ``error``."""
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else FAILED if error.code else DONE
    return FAULT if is_fault(error) else FAILED


def is_fault(error: BaseException | None) -> bool:
    """Whether another start may cure ``error`` or what led to it: a device, NCCL, a lost connection, a file system.

    Too little memory and failed assertions on the device are errors of the program.
    """
    while error is not None:
        text, names = text_of(error), {kind.__name__ for kind in type(error).__mro__}
        if "PeerFailure" in names:
            return bool(getattr(error, "exit_code", FAILED) == FAULT)
        if "OutOfMemoryError" in names or any(word in text for word in _OWN_WORDS):
            return False
        if names.intersection(_FAULTS) or (isinstance(error, OSError) and error.errno in _FAULT_ERRNOS):
            return True
        if isinstance(error, RuntimeError) and any(word in text for word in _FAULT_WORDS):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False

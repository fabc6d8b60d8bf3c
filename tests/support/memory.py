"""Peak host memory of a function, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MB = 2**20


def resident(what: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the peak) of this process, in bytes."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) * 1024


def peak_of(job: Callable[[], object]) -> int:
    """By how many bytes this process grew at most while ``job`` ran."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed memory would be used again unseen
    _RESET.write_text("5")  # the peak is reset
    before = resident("VmRSS")
    job()
    return resident("VmHWM") - before

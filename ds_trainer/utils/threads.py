"""Threads that use the GPU of this process. All threads of the package are started here.

CUDA's current device is a property of a thread, and a new thread has device 0. Any use of CUDA there (a stream, an
event, the abort of a communicator, page-locked memory) creates a context on device 0: half a GB of GPU 0 for every rank
of the machine. So each thread first selects the device of the thread that created it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def new_thread(function: Callable[..., Any], *args: Any, name: str, daemon: bool = True) -> threading.Thread:
    """A thread that will run ``function(*args)`` on the GPU of the calling thread; not started yet."""
    device = _current_device()

    def run() -> None:
        _use_device(device)
        function(*args)

    return threading.Thread(target=run, name=name, daemon=daemon)


def new_executor(name: str, workers: int = 1) -> ThreadPoolExecutor:
    """An executor whose threads use the GPU of the calling thread."""
    return ThreadPoolExecutor(workers, name, initializer=_use_device, initargs=(_current_device(),))


def _current_device() -> int | None:
    """The calling thread's CUDA device; None if this process has not used CUDA. Imports nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def _use_device(device: int | None) -> None:
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)

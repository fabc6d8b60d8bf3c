"""Measures memory and reads of processes during a piece of work.

*Private* memory is resident anonymous and shared memory (``RssAnon + RssShmem``). It excludes mapped files, whose pages
belong to the page cache of the node. A separate process takes a sample every two milliseconds, so that no peak is
missed while the measured process is busy.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

MB = 2**20
_PRELOADED = ["torch", "deepspeed", "transformers.models.llama.modeling_llama", "ds_trainer.training.trainer"]


class Look(NamedTuple):
    """Memory of a process at a time, in bytes."""

    when: float
    private: int
    mapped: int


def look(pid: int | str = "self") -> Look:
    """At a process: anonymous and shared memory that is here now, and pages of mapped files."""
    sizes = dict.fromkeys((b"RssAnon", b"RssShmem", b"RssFile"), 0)
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        for line in file.read().splitlines():
            name, _, value = line.partition(b":")
            if name in sizes:
                sizes[name] = int(value.split()[0]) * 1024
    return Look(time.monotonic(), sizes[b"RssAnon"] + sizes[b"RssShmem"], sizes[b"RssFile"])


class Watch:
    """Looks at other processes, in a thread, while it is entered."""

    def __init__(self, pids: list[int], seconds: float = 0.002) -> None:
        self.looks: list[list[Look]] = [[] for _ in pids]
        self._pids, self._seconds = pids, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            for pid, looks in zip(self._pids, self.looks, strict=True):
                try:
                    looks.append(look(pid))
                except (FileNotFoundError, ProcessLookupError):  # it has ended
                    continue

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def asked_for() -> dict[str, int]:
    """Bytes that this process asked the kernel for (``rchar``), in how many calls (``syscr``), and from a disk."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in lines if name in ("rchar", "syscr", "read_bytes")}


def watched(
    work: Callable[..., Any], arguments: tuple[Any, ...], environments: list[dict[str, str]], seconds: float = 900
) -> tuple[list[Any], list[list[Look]]]:
    """Do ``work(ready, *arguments)`` in a process for each environment; what each returned, and looks at each.

    The processes have imported torch, DeepSpeed and the Trainer already. ``ready()`` waits until all have called it:
    then they are looked at.

    Raises:
        RuntimeError: one failed, or did not answer in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    pipes, processes = [], []
    try:
        for environment in environments:
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, work, arguments, environment), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        for pipe in pipes:
            _answer(pipe, seconds)
        with Watch([process.pid or 0 for process in processes]) as watch:
            for pipe in pipes:
                pipe.send("go")
            results = [_answer(pipe, seconds) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results, watch.looks


def _work(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.update(environment)

    def ready() -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed memory would be used again unseen
        pipe.send((True, None))
        pipe.recv()

    try:
        pipe.send((True, work(ready, *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _answer(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise RuntimeError(f"no answer within {seconds:.0f} s")
    good, value = pipe.recv()
    if not good:
        raise RuntimeError(value)
    return value

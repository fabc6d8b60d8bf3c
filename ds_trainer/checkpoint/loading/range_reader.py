"""Reading elements out of files: no byte more than is wanted, except small gaps, in bounded memory."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor
from ds_trainer.checkpoint.weights.geometry import View, coalesced
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.threads import new_executor

BUFFER_BYTES = 64 * 2**20
"""Host memory of a reader, by default."""
SMALL_GAP = 4096
"""Gaps of fewer bytes are read along: a page of the file comes anyway."""
_THREADS = 4
_OPEN_FILES = 32


class _Read(NamedTuple):
    """One piece of work: elements of a file, and where they go."""

    stored: StoredTensor
    source: View
    target: View


class RangeReader:
    """Reads elements of stored tensors into tensors. For one caller at a time.

    Args:
        buffer_bytes: host memory for what cannot be read straight into its target: elements that have to be converted,
            moved to a device, or that lie in the file in another order.

    Attributes:
        bytes_read: bytes that were asked of the file system, with the gaps that were read along.
        seconds: time spent in :meth:`read`.
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        if buffer_bytes < _THREADS * 4096:
            raise ConfigError(
                f"a buffer of {buffer_bytes} bytes is too small to read with: {_THREADS * 4096} are needed."
            )
        self.buffer_bytes = buffer_bytes
        self.bytes_read = 0
        self.seconds = 0.0
        self._chunk = buffer_bytes // _THREADS // 64 * 64
        self._counting = threading.Lock()
        self._files: dict[Path, int] = {}
        # Not by __del__: when the interpreter ends, what that calls may be gone before the reader is.
        weakref.finalize(self, _close_all, self._files)
        self._buffers: queue.SimpleQueue[torch.Tensor] | None = None
        self._pinned = False
        self._pool: ThreadPoolExecutor | None = None

    def read(self, wanted: Sequence[tuple[StoredTensor, View, View]], target: torch.Tensor) -> None:
        """Fill ``target``.

        Args:
            wanted: for each stored tensor the elements of it (counted from its first one) and, of equal shape, the
                elements of ``target`` that they become.
            target: flat and contiguous, on any device.

        Raises:
            ConfigError: elements cannot be converted to the type of ``target``, or a file ends early.
            OSError: a file cannot be read.
        """
        began = time.monotonic()
        for stored in {id(stored): stored for stored, _, _ in wanted}.values():
            check_conversion(stored, target.dtype)
        self._open({stored.path for stored, _, _ in wanted})
        target = target.detach()
        reads = (read for one in wanted for read in self._split(*one))
        stream = torch.cuda.current_stream(target.device) if target.is_cuda else None
        first, second = next(reads, None), next(reads, None)
        if first is not None and second is None:  # not worth a thread
            self._perform(first, target, stream)
        elif first is not None and second is not None:
            self._perform_all(first, second, reads, target, stream)
        self.seconds += time.monotonic() - began

    def close(self) -> None:
        """Let go of files, threads and memory; the next read takes new ones."""
        _close_all(self._files)
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._buffers = None

    def _open(self, paths: set[Path]) -> None:
        if len(self._files) + len(paths) > _OPEN_FILES:
            for path in [path for path in self._files if path not in paths]:
                os.close(self._files.pop(path))
        for path in paths - self._files.keys():
            self._files[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def _perform_all(
        self,
        first: _Read,
        second: _Read,
        others: Iterator[_Read],
        target: torch.Tensor,
        stream: torch.cuda.Stream | None,
    ) -> None:
        if self._pool is None:
            self._pool = new_executor("weights", _THREADS)
        turns, failure = threading.Lock(), threading.Event()
        waiting = iter((first, second))

        def next_read() -> _Read | None:
            with turns:
                return None if failure.is_set() else next(waiting, None) or next(others, None)

        def work() -> None:
            if target.is_cuda:
                torch.cuda.set_device(target.device)  # the reader may be used for several
            try:
                while (read := next_read()) is not None:
                    self._perform(read, target, stream)
            except BaseException:
                failure.set()
                raise

        futures = [self._pool.submit(work) for _ in range(_THREADS)]
        wait(futures)
        for future in futures:
            future.result()

    def _split(self, stored: StoredTensor, source: View, target: View) -> Iterator[_Read]:
        """Pieces of work that each take at most a chunk of the buffer, in the order of the file."""
        source, target = coalesced((source, target))
        size = stored.dtype.itemsize  # type: ignore[union-attr]  # check_conversion saw to it
        largest = self._chunk // size
        runs = _dense_dimension(source, SMALL_GAP // size)
        outer = source.shape[:runs]
        for index in product(*map(range, outer)):
            origin = (*index, *(0 for _ in source.shape[runs:]))
            shape = (*(1 for _ in index), *source.shape[runs:])
            for piece in _bounded(source.box(origin, shape), target.box(origin, shape), largest):
                yield _Read(stored, *coalesced(piece))

    def _perform(self, read: _Read, target: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        source, to = read.source, read.target
        size = read.stored.dtype.itemsize  # type: ignore[union-attr]  # check_conversion saw to it
        begin, length = read.stored.offset + source.offset * size, source.span * size
        straight = (
            target.device.type == "cpu"
            and target.dtype == read.stored.dtype
            and source.span == source.numel
            and source.strides == to.strides
        )
        if straight:
            part = target[to.offset : to.offset + source.numel]
            self.fill_bytes(read.stored.path, begin, part.view(torch.uint8))
            return
        buffers = self._staging(target.is_cuda)
        buffer = buffers.get()
        try:
            staged = buffer[:length]
            self.fill_bytes(read.stored.path, begin, staged)
            flat = staged.view(read.stored.dtype)  # type: ignore[arg-type]
            if stream is None:
                _copy(flat, source, target, to)
            else:
                with torch.cuda.stream(stream):  # where the caller's work on the target is
                    # Converted there: converting first would take as much host memory again.
                    _copy(flat.to(target.device), source, target, to)
        finally:
            buffers.put(buffer)

    def _staging(self, pinned: bool) -> queue.SimpleQueue[torch.Tensor]:
        with self._counting:
            if self._buffers is None or (pinned and not self._pinned):
                self._buffers = queue.SimpleQueue()
                for _ in range(_THREADS):
                    self._buffers.put(torch.empty(self._chunk, dtype=torch.uint8, pin_memory=pinned))
                self._pinned = pinned
            return self._buffers

    def fill_bytes(self, path: Path, begin: int, memory: torch.Tensor) -> None:
        """Read ``memory``, ``uint8[bytes]`` on the CPU, from byte ``begin`` of a file. All reading ends here."""
        view, position = memory.numpy().data, 0
        while position < len(view):
            count = os.preadv(self._files[path], [view[position:]], begin + position)
            if count == 0:
                raise ConfigError(
                    f"{path} ended at byte {begin + position}, and {len(view) - position} more were wanted: it became "
                    "shorter while it was read."
                )
            position += count
        with self._counting:
            self.bytes_read += len(view)


def _close_all(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def check_conversion(stored: StoredTensor, dtype: torch.dtype) -> None:
    """Refuse to read elements of ``stored`` as ``dtype`` where that would change what they mean.

    Raises:
        ConfigError: they are of another type, and one of both is no ordinary floating type.
    """
    if stored.dtype == dtype:
        return
    if stored.dtype is None or not all(kind.is_floating_point and kind.itemsize > 1 for kind in (stored.dtype, dtype)):
        raise ConfigError(
            f"{stored.path} holds a tensor of type {stored.type_name}, and {dtype} is wanted. Only float64, float32, "
            "float16 and bfloat16 are converted into each other; quantized weights mean nothing without their scales. "
            "Use a model directory with ordinary weights."
        )


def _dense_dimension(source: View, small_gap: int) -> int:
    """The dimension from which on the elements are read as one run: its gaps, and those further in, are small."""
    span = 1
    for axis in reversed(range(len(source.shape))):
        if source.strides[axis] - span > small_gap:
            return axis + 1
        span += (source.shape[axis] - 1) * source.strides[axis]
    return 0


def _bounded(source: View, target: View, largest: int) -> Iterator[tuple[View, View]]:
    """The same elements in pieces whose span is at most ``largest`` elements."""
    if source.span <= largest:
        yield source, target
        return
    axis = next(axis for axis, size in enumerate(source.shape) if size > 1)
    inner = source.narrow(axis, 0, 1).span
    step = max(1, (largest - inner) // max(1, source.strides[axis]) + 1)
    for start in range(0, source.shape[axis], step):
        length = min(step, source.shape[axis] - start)
        yield from _bounded(source.narrow(axis, start, length), target.narrow(axis, start, length), largest)


def _copy(flat: torch.Tensor, source: View, target: torch.Tensor, to: View) -> None:
    """Elements of ``flat``, which begins with the first element of ``source``, into ``target``."""
    there = target.as_strided(to.shape, to.strides, target.storage_offset() + to.offset)
    there.copy_(flat.as_strided(source.shape, source.strides, flat.storage_offset()))

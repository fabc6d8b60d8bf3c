"""Reads elements from files in bounded memory: only the requested bytes and small gaps between them."""

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
from ds_trainer.checkpoint.weights.strided_views import StridedView, coalesced
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.threads import new_executor

BUFFER_BYTES = 64 * 2**20
"""Default host memory of a reader."""
SMALL_GAP = 4096
"""Gaps smaller than this many bytes are read too: the file system reads whole pages anyway."""
_THREADS = 4
_OPEN_FILES = 32


class _Read(NamedTuple):
    """One read: elements of a file and their destination."""

    stored: StoredTensor
    source: StridedView
    target: StridedView


class RangeReader:
    """Reads elements of stored tensors into tensors. Not thread-safe: one caller at a time.

    Args:
        buffer_bytes: host memory for elements that cannot be read directly into their target because they are
            converted, moved to a device, or reordered.

    Attributes:
        bytes_read: bytes read from the file system, including gaps.
        seconds: time spent in :meth:`read`.
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        if buffer_bytes < _THREADS * 4096:
            raise ConfigError(
                f"buffer_bytes={buffer_bytes} is too small. At least {_THREADS * 4096} bytes are required."
            )
        self.buffer_bytes = buffer_bytes
        self.bytes_read = 0
        self.seconds = 0.0
        self._chunk = buffer_bytes // _THREADS // 64 * 64
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        # Not __del__: at interpreter exit, what it calls may be gone before the reader.
        weakref.finalize(self, _close_all, self._files)
        self._buffers: queue.SimpleQueue[torch.Tensor] | None = None
        self._pinned = False
        self._pool: ThreadPoolExecutor | None = None

    def read(self, ranges: Sequence[tuple[StoredTensor, StridedView, StridedView]], target: torch.Tensor) -> None:
        """Fill ``target``.

        Args:
            ranges: triples of a stored tensor, a view of its elements (offsets relative to its first element), and a
                view of equal shape of the elements of ``target`` that they fill.
            target: flat and contiguous, on any device.

        Raises:
            ConfigError: elements cannot be converted to the dtype of ``target``, or a file ends early.
            OSError: a file cannot be read.
        """
        began = time.monotonic()
        for stored in {id(stored): stored for stored, _, _ in ranges}.values():
            check_conversion(stored, target.dtype)
        self._open({stored.path for stored, _, _ in ranges})
        target = target.detach()
        reads = (read for entry in ranges for read in self._split(*entry))
        stream = torch.cuda.current_stream(target.device) if target.is_cuda else None
        first, second = next(reads, None), next(reads, None)
        if first is not None and second is None:  # one read is not worth a thread
            self._perform(first, target, stream)
        elif first is not None and second is not None:
            self._perform_all(first, second, reads, target, stream)
        self.seconds += time.monotonic() - began

    def close(self) -> None:
        """Close files, stop threads and free buffers; the next read recreates them."""
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
        lock, failure = threading.Lock(), threading.Event()
        pending = iter((first, second))

        def next_read() -> _Read | None:
            with lock:
                return None if failure.is_set() else next(pending, None) or next(others, None)

        def work() -> None:
            if target.is_cuda:
                torch.cuda.set_device(target.device)  # the reader may serve several devices
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

    def _split(self, stored: StoredTensor, source: StridedView, target: StridedView) -> Iterator[_Read]:
        """Yields reads that each need at most one chunk of the buffer, in file order."""
        source, target = coalesced((source, target))
        size = stored.dtype.itemsize  # type: ignore[union-attr]  # ensured by check_conversion
        largest = self._chunk // size
        runs = _dense_dimension(source, SMALL_GAP // size)
        outer = source.shape[:runs]
        for index in product(*map(range, outer)):
            origin = (*index, *(0 for _ in source.shape[runs:]))
            shape = (*(1 for _ in index), *source.shape[runs:])
            for part in _bounded(source.box(origin, shape), target.box(origin, shape), largest):
                yield _Read(stored, *coalesced(part))

    def _perform(self, read: _Read, target: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        source, to = read.source, read.target
        size = read.stored.dtype.itemsize  # type: ignore[union-attr]  # ensured by check_conversion
        begin, length = read.stored.offset + source.offset * size, source.span * size
        direct = (
            target.device.type == "cpu"
            and target.dtype == read.stored.dtype
            and source.span == source.numel
            and source.strides == to.strides
        )
        if direct:
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
                with torch.cuda.stream(stream):  # the stream of the caller's work on the target
                    # Convert on the device: converting first would take as much host memory again.
                    _copy(flat.to(target.device), source, target, to)
        finally:
            buffers.put(buffer)

    def _staging(self, pinned: bool) -> queue.SimpleQueue[torch.Tensor]:
        with self._lock:
            if self._buffers is None or (pinned and not self._pinned):
                self._buffers = queue.SimpleQueue()
                for _ in range(_THREADS):
                    self._buffers.put(torch.empty(self._chunk, dtype=torch.uint8, pin_memory=pinned))
                self._pinned = pinned
            return self._buffers

    def fill_bytes(self, path: Path, begin: int, memory: torch.Tensor) -> None:
        """Fill ``memory``, ``uint8[bytes]`` on the CPU, from byte ``begin`` of a file. All reads go through here."""
        view, position = memory.numpy().data, 0
        while position < len(view):
            count = os.preadv(self._files[path], [view[position:]], begin + position)
            if count == 0:
                raise ConfigError(
                    f"{path} ended at byte {begin + position}, {len(view) - position} bytes early: it was truncated "
                    "while it was read. Copy or download it again."
                )
            position += count
        with self._lock:
            self.bytes_read += len(view)


def _close_all(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def check_conversion(stored: StoredTensor, dtype: torch.dtype) -> None:
    """Check that elements of ``stored`` can be read as ``dtype`` without changing their meaning.

    Raises:
        ConfigError: the dtypes differ, and one of them is not an ordinary floating-point type.
    """
    if stored.dtype == dtype:
        return
    if stored.dtype is None or not all(kind.is_floating_point and kind.itemsize > 1 for kind in (stored.dtype, dtype)):
        raise ConfigError(
            f"{stored.path} holds a tensor of type {stored.type_name}, which cannot be read as {dtype}. Only float64, "
            "float32, float16 and bfloat16 are converted into each other; quantized weights are meaningless without "
            "their scales. Use a model directory with unquantized weights."
        )


def _dense_dimension(source: StridedView, small_gap: int) -> int:
    """Returns the first dimension from which the elements are read as one run, because all gaps within are small."""
    span = 1
    for axis in reversed(range(len(source.shape))):
        if source.strides[axis] - span > small_gap:
            return axis + 1
        span += (source.shape[axis] - 1) * source.strides[axis]
    return 0


def _bounded(source: StridedView, target: StridedView, largest: int) -> Iterator[tuple[StridedView, StridedView]]:
    """Splits the views into parts whose span is at most ``largest`` elements."""
    if source.span <= largest:
        yield source, target
        return
    axis = next(axis for axis, size in enumerate(source.shape) if size > 1)
    inner = source.narrow(axis, 0, 1).span
    step = max(1, (largest - inner) // max(1, source.strides[axis]) + 1)
    for start in range(0, source.shape[axis], step):
        length = min(step, source.shape[axis] - start)
        yield from _bounded(source.narrow(axis, start, length), target.narrow(axis, start, length), largest)


def _copy(flat: torch.Tensor, source: StridedView, target: torch.Tensor, to: StridedView) -> None:
    """Copy elements of ``flat``, which starts at the first element of ``source``, into ``target``."""
    destination = target.as_strided(to.shape, to.strides, target.storage_offset() + to.offset)
    destination.copy_(flat.as_strided(source.shape, source.strides, flat.storage_offset()))

"""A copy of the engine's state in host memory, so that training continues while the copy is written.

The copy has the layout of the file, so writing it is one pass over memory. Tensors that only an optimizer step changes
(master weights and optimizer states: nearly everything) may be copied during the next forward and backward pass, as
long as that step waits for the copy. Tensors of the model itself (buffers, frozen weights, and all weights if there are
no masters) are copied at once, because a forward pass may change them.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import torch

from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile
from ds_trainer.checkpoint.protocol.shared_files import SharedFiles
from ds_trainer.checkpoint.shards.frozen_weights import FrozenContent
from ds_trainer.checkpoint.shards.model_plan import TensorLocation
from ds_trainer.checkpoint.shards.shard_content import InPlaceWrite, ShardContent, write_in_place
from ds_trainer.checkpoint.shards.shard_file import ShardFilePlan, plan_shard_file, write_bytes
from ds_trainer.engine.state.state_shards import StateShard
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils import distributed
from ds_trainer.utils.host_memory import free_host_memory

MEMORY_FRACTION = 0.7
"""Snapshots may take this fraction of the free host memory; the rest is for batches and the page cache."""


# Host memory for snapshots, in blocks of bounded size.


MAX_BLOCK = 2**30
MIN_BLOCK = 2**24
"""Bytes of the largest and the smallest page-locked block. torch rounds each block up to a power of two."""

_CHUNK = 32 * 2**20  # bytes


class StagingBuffer:
    """Host memory for one snapshot at a time. It is reused by the next one, because first-touch of memory is slow.

    Args:
        pinned: page-locked, so that a GPU copies to it without the CPU.
        max_block: bytes of the largest block; a power of two.
        min_block: bytes of the smallest page-locked block; a power of two, at most ``max_block``.
    """

    def __init__(self, pinned: bool = False, max_block: int = MAX_BLOCK, min_block: int = MIN_BLOCK) -> None:
        self.pinned = pinned
        self._max_block, self._min_block = max_block, min_block
        self._files: list[list[torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(block.numel() for blocks in self._files for block in blocks)

    def blocks(self, index: int, size: int) -> list[torch.Tensor]:
        """Returns ``size`` bytes for file ``index`` of a snapshot, in order. Reuses the previous snapshot's memory and
        allocates what is missing.
        """
        while len(self._files) <= index:
            self._files.append([])
        blocks = self._files[index]
        missing = size - sum(block.numel() for block in blocks)
        blocks += [_allocate(part, self.pinned) for part in self._block_sizes(missing)]
        views, position = [], 0
        for block in blocks:
            if position < size:
                views.append(block[: size - position])
                position += views[-1].numel()
        return views

    def allocated_bytes(self, sizes: Sequence[int]) -> int:
        """Returns the bytes that files of ``sizes`` bytes take, rounding of page-locked memory included."""
        return sum(part for size in sizes for part in self._block_sizes(size))

    def preallocate(self, sizes: Sequence[int]) -> None:
        """Allocate and touch memory for files of ``sizes`` bytes, so that the first snapshot is as fast as the next."""
        for index, size in enumerate(sizes):
            for block in self.blocks(index, size):
                for start in range(0, block.numel(), _CHUNK):
                    block[start : start + _CHUNK].zero_()

    def release(self) -> None:
        """Give all memory back to the system; no snapshot may be in use.

        torch keeps freed page-locked blocks for itself: a later training of this process would count them as used, and
        find no room for its own. Source: ``CachingHostAllocatorImpl::empty_cache`` (aten/src/ATen/core).
        """
        self._files = []
        empty_cache = getattr(torch._C, "_host_emptyCache", None)  # only in builds with a GPU
        if self.pinned and empty_cache is not None:
            empty_cache()

    def _block_sizes(self, size: int) -> list[int]:
        """Sizes of blocks that hold ``size`` bytes together; page-locked blocks are powers of two."""
        if size <= 0:
            return []
        parts, rest = [self._max_block] * (size // self._max_block), size % self._max_block
        if not self.pinned:
            return [*parts, rest] if rest else parts
        while rest > 0:
            parts.append(max(self._min_block, 1 << (rest.bit_length() - 1)))
            rest -= parts[-1]
        return parts


def _allocate(size: int, pinned: bool) -> torch.Tensor:
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults
    return torch.frombuffer(pages, dtype=torch.uint8)


def _never(shard: StateShard) -> bool:
    return False


@dataclass(frozen=True)
class CopiedFile:
    """A shard file in host memory, and this rank's part of the model's files.

    Attributes:
        name: the file's name.
        header: its first bytes.
        blocks: the bytes of all shards.
        written: how many of these bytes the file holds, counted from the first.
        in_model: for each shard that goes into the model's files: where the whole tensor is stored, which of its
            elements the shard has, their type, and the shard's first byte in ``blocks``.
    """

    name: str
    header: bytes
    blocks: list[torch.Tensor]
    written: int
    in_model: list[tuple[TensorLocation, ShardSlice, torch.dtype, int]]

    @classmethod
    def of(cls, name: str, plan: ShardFilePlan, blocks: list[torch.Tensor]) -> CopiedFile:
        """A file whose shards are consecutive in ``blocks``."""
        in_model = [(stored, shard.slice, shard.tensor.dtype, offset) for stored, shard, offset in plan.in_model]
        return cls(name, plan.header, blocks, plan.written, in_model)

    def write(self, stream: BinaryIO) -> None:
        """Write the content to ``stream``."""
        stream.write(self.header)
        for part in self._bytes(0, self.written):
            write_bytes(stream, part)

    def write_shared(self, files: SharedFiles) -> None:
        """Write the elements that shared files hold."""
        writes = [
            InPlaceWrite(stored, slice_, partial(self._elements, dtype, offset))
            for stored, slice_, dtype, offset in self.in_model
        ]
        write_in_place(files, writes)

    def _elements(self, dtype: torch.dtype, offset: int, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of the shard at byte ``offset``; copied if no single block holds them aligned."""
        parts = list(self._bytes(offset + start * dtype.itemsize, offset + stop * dtype.itemsize))
        aligned = len(parts) == 1 and parts[0].storage_offset() % dtype.itemsize == 0
        return (parts[0] if aligned else torch.cat(parts)).view(dtype)

    def _bytes(self, first: int, last: int) -> Iterator[torch.Tensor]:
        """Bytes ``[first, last)`` of all blocks, as views."""
        position = 0
        for block in self.blocks:
            start, stop = max(first - position, 0), min(last - position, block.numel())
            if start < stop:
                yield block[start:stop]
            position += block.numel()


class Snapshot:
    """A copy of checkpoint files. Later steps do not change it, once :meth:`copy_deferred` has returned.

    Args:
        files: one rank's files. Shard files are copied; the others must be in memory already.
        staging_buffer: memory for the copy. Overwrites the previous snapshot in the same buffer.
        may_defer: tells which shards :meth:`copy_deferred` may copy later; default: none.

    Raises:
        ValueError: a tensor has a type that safetensors cannot hold.
    """

    def __init__(
        self,
        files: Iterable[CheckpointFile],
        staging_buffer: StagingBuffer,
        may_defer: Callable[[StateShard], bool] = _never,
    ) -> None:
        self.contents: list[CheckpointFile] = []
        self._deferred: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._failure: BaseException | None = None
        self._copied = threading.Event()
        cuda = staging_buffer.pinned and torch.cuda.is_available()
        self._stream = torch.cuda.Stream() if cuda else None
        count = 0
        for file in files:
            if isinstance(file, FrozenContent):  # copied once; its memory is freed with this snapshot
                file = self._copy(file, StagingBuffer(), 0, _never)
            elif isinstance(file, ShardContent):
                # Shards of a second file were swapped in from NVMe and are valid only now.
                file = self._copy(file, staging_buffer, count, may_defer if count == 0 else _never)
                count += 1
            self.contents.append(file)
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        if not self._deferred:
            self._copied.set()

    def _copy(
        self, content: ShardContent, staging_buffer: StagingBuffer, index: int, may_defer: Callable[[StateShard], bool]
    ) -> CopiedFile:
        plan = plan_shard_file(content.shards, content.scalars, content.locate)
        blocks = staging_buffer.blocks(index, plan.size)
        free = list(blocks)
        for shard in plan.shards:
            source = shard.tensor.detach().reshape(-1).view(torch.uint8)
            while source.numel():  # a shard may continue in the next block
                size = min(source.numel(), free[0].numel())
                target, part = free[0][:size], source[:size]
                if may_defer(shard):
                    self._deferred.append((target, part))
                else:
                    target.copy_(part, non_blocking=self._stream is not None)
                source, free[0] = source[size:], free[0][size:]
                if not free[0].numel():
                    del free[0]
        return CopiedFile.of(content.name, plan, blocks)

    def copy_deferred(self) -> None:
        """Copy the deferred shards. Call once, from any thread.

        Does not raise: :meth:`files` raises what went wrong.
        """
        try:
            if self._stream is None:
                for target, source in self._deferred:
                    target.copy_(source)
            else:
                # Work queued on the device before the snapshot has finished: __init__ synchronized.
                with torch.cuda.stream(self._stream):
                    for target, source in self._deferred:
                        target.copy_(source, non_blocking=True)
                self._stream.synchronize()
        except Exception as error:
            self._failure = error
        finally:
            self._deferred = []
            self._copied.set()

    def wait(self) -> None:
        """Wait until everything is copied. Call this before changing the state that is being copied."""
        self._copied.wait()

    def files(self) -> Iterator[CheckpointFile]:
        """Yields the copied files, after waiting until everything is copied.

        Raises:
            Exception: what :meth:`copy_deferred` failed with.
        """
        self._copied.wait()
        if self._failure is not None:
            raise self._failure
        yield from self.contents


def shard_file_sizes(files: Iterable[CheckpointFile]) -> list[int]:
    """Returns the bytes of tensors in each shard file that every save writes; frozen weights are not included."""
    shard_files = [file for file in files if isinstance(file, ShardContent) and not isinstance(file, FrozenContent)]
    return [sum(shard.tensor.nbytes for shard in file.shards) for file in shard_files]


def frozen_copy_bytes(files: Iterable[CheckpointFile]) -> int:
    """Returns the bytes of the frozen weights; the first save holds a copy of them until it is written."""
    return sum(shard.tensor.nbytes for file in files if isinstance(file, FrozenContent) for shard in file.shards)


def fits_in_memory(needed: int) -> bool:
    """Returns whether ``needed`` more bytes on every rank fit into the free host memory. Collective, same on all ranks.

    Counts what all ranks of a machine need together.
    """
    by_rank = distributed.gather_to_main((socket.gethostname(), free_host_memory(), needed))
    by_host: dict[str, int] = {}
    for host, _, size in by_rank or ():
        by_host[host] = by_host.get(host, 0) + size
    fits = all(by_host[host] <= free * MEMORY_FRACTION for host, free, _ in by_rank or ())
    return bool(distributed.broadcast_object(fits))

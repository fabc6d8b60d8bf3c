"""Host memory for snapshots, in blocks of bounded size."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

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

"""Host memory for snapshots, in blocks of bounded size."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

BLOCK = 2**30
SMALLEST = 2**24
"""Bytes of the largest and the smallest page-locked block: torch rounds each up to a power of two."""

_CHUNK = 32 * 2**20  # bytes


class Arena:
    """Host memory for one snapshot at a time, kept from one to the next: the first touch of memory is slow.

    Args:
        pinned: page-locked, which a GPU copies to without help of the CPU.
        block: bytes of the largest block; a power of two.
        smallest: bytes of the smallest page-locked block; a power of two, no more than ``block``.
    """

    def __init__(self, pinned: bool = False, block: int = BLOCK, smallest: int = SMALLEST) -> None:
        self.pinned = pinned
        self._block, self._smallest = block, smallest
        self._files: list[list[torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now."""
        return sum(block.numel() for blocks in self._files for block in blocks)

    def blocks(self, index: int, size: int) -> list[torch.Tensor]:
        """``size`` bytes for the ``index``-th file of a snapshot, in order: those of the snapshot before, and what is
        missing."""
        while len(self._files) <= index:
            self._files.append([])
        blocks = self._files[index]
        missing = size - sum(block.numel() for block in blocks)
        blocks += [_memory(part, self.pinned) for part in self._parts(missing)]
        taken, position = [], 0
        for block in blocks:
            if position < size:
                taken.append(block[: size - position])
                position += taken[-1].numel()
        return taken

    def room_for(self, sizes: Sequence[int]) -> int:
        """Bytes of memory that files of ``sizes`` bytes take: torch rounds page-locked memory up to a power of two."""
        return sum(part for size in sizes for part in self._parts(size))

    def prepare(self, sizes: Sequence[int]) -> None:
        """Take the memory for files of ``sizes`` bytes now, so that the first snapshot is as quick as the others."""
        for index, size in enumerate(sizes):
            for block in self.blocks(index, size):
                for start in range(0, block.numel(), _CHUNK):
                    block[start : start + _CHUNK].zero_()

    def _parts(self, size: int) -> list[int]:
        """Sizes of blocks that hold ``size`` bytes together; the page-locked ones are powers of two."""
        if size <= 0:
            return []
        parts, rest = [self._block] * (size // self._block), size % self._block
        if not self.pinned:
            return [*parts, rest] if rest else parts
        while rest > 0:
            parts.append(max(self._smallest, 1 << (rest.bit_length() - 1)))
            rest -= parts[-1]
        return parts


def _memory(size: int, pinned: bool) -> torch.Tensor:
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults
    return torch.frombuffer(pages, dtype=torch.uint8)

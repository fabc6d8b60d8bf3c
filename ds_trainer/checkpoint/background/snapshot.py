"""An engine's state copied into host memory, so that training goes on while it is written.

The copy has the order of the file: writing it is one pass over memory. What only an optimizer step changes (master
weights and optimizer states: nearly all of it) may be copied while the next forward and backward pass runs, as long as
that step waits for the copy. What belongs to the model itself (buffers, frozen weights, and all weights where there
are no masters) is copied at once: a forward pass may change it.
"""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import psutil
import torch

from ds_trainer.checkpoint.pieces.content import PiecesContent
from ds_trainer.checkpoint.pieces.file import arrange, write_bytes
from ds_trainer.checkpoint.protocol.contents import Content
from ds_trainer.engine.state.pieces import Piece
from ds_trainer.utils import distributed

SHARE_OF_FREE_MEMORY = 0.7
"""Snapshots may take this much of the host memory that is free; the rest is for batches and the page cache."""

_CHUNK = 32 * 2**20  # bytes


class Arena:
    """Host memory for one snapshot at a time, kept from one to the next: the first touch of memory is slow.

    Args:
        pinned: page-locked, which a GPU copies to without help of the CPU.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._blocks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now."""
        return sum(block.numel() for block in self._blocks)

    def block(self, index: int, size: int) -> torch.Tensor:
        """``size`` bytes for the ``index``-th file of a snapshot: those of the snapshot before, if there are enough."""
        while len(self._blocks) <= index:
            self._blocks.append(torch.empty(0, dtype=torch.uint8))
        if self._blocks[index].numel() < size:
            self._blocks[index] = torch.empty(0, dtype=torch.uint8)  # let go first: both together may be too much
            self._blocks[index] = _memory(size, self.pinned)
        return self._blocks[index][:size]

    def room_for(self, sizes: Sequence[int]) -> int:
        """Bytes of memory that files of ``sizes`` bytes take: torch rounds page-locked memory up to a power of two."""
        return sum(1 << max(0, size - 1).bit_length() if self.pinned else size for size in sizes)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Take the memory for files of ``sizes`` bytes now, so that the first snapshot is as quick as the others."""
        for index, size in enumerate(sizes):
            block = self.block(index, size)
            for start in range(0, size, _CHUNK):
                block[start : start + _CHUNK].zero_()


def _memory(size: int, pinned: bool) -> torch.Tensor:
    if pinned or size == 0:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults
    return torch.frombuffer(pages, dtype=torch.uint8)


@dataclass(frozen=True)
class Copied:
    """A file of pieces in host memory."""

    name: str
    head: bytes
    data: torch.Tensor

    def write(self, stream: BinaryIO) -> None:
        stream.write(self.head)
        write_bytes(stream, self.data)


class Snapshot:
    """Contents of which later steps change nothing, once :meth:`complete` has returned.

    Args:
        contents: the files of one rank; those of pieces are copied, the others must be in memory already.
        arena: where to; of a snapshot before, nothing stays valid.
        waits: which pieces may wait for :meth:`complete`; by default none does.

    Raises:
        ValueError: a tensor has a type that a file of pieces cannot hold.
    """

    def __init__(
        self, contents: Iterable[Content], arena: Arena, waits: Callable[[Piece], bool] = lambda piece: False
    ) -> None:
        self.contents: list[Content] = []
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._failure: BaseException | None = None
        self._copied = threading.Event()
        cuda = arena.pinned and torch.cuda.is_available()
        self._stream = torch.cuda.Stream() if cuda else None
        files = 0
        for content in contents:
            if isinstance(content, PiecesContent):
                # Pieces of a second file have been swapped in for this moment only.
                content = self._copy(content, arena, files, waits if files == 0 else lambda piece: False)
                files += 1
            self.contents.append(content)
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        if not self._waiting:
            self._copied.set()

    def _copy(self, content: PiecesContent, arena: Arena, index: int, waits: Callable[[Piece], bool]) -> Copied:
        arranged = arrange(content.pieces, content.scalars)
        data = arena.block(index, arranged.size)
        position = 0
        for piece in arranged.pieces:
            source = piece.tensor.detach().reshape(-1)
            target = data[position : position + source.nbytes].view(source.dtype)
            position += source.nbytes
            if waits(piece):
                self._waiting.append((target, source))
            else:
                target.copy_(source, non_blocking=self._stream is not None)
        return Copied(content.name, arranged.head, data)

    def complete(self) -> None:
        """Copy what may wait; from any thread, once.

        Raises nothing: whoever asks for the :meth:`files` is told what went wrong.
        """
        try:
            if self._stream is None:
                for target, source in self._waiting:
                    target.copy_(source)
            else:
                # All that was asked of the device before the snapshot has ended: __init__ waited for it.
                with torch.cuda.stream(self._stream):
                    for target, source in self._waiting:
                        target.copy_(source, non_blocking=True)
                self._stream.synchronize()
        except Exception as error:
            self._failure = error
        finally:
            self._waiting = []
            self._copied.set()

    def wait(self) -> None:
        """Return when everything is copied: before what was read is changed."""
        self._copied.wait()

    def files(self) -> Iterator[Content]:
        """The contents, when everything is copied.

        Raises:
            Exception: what :meth:`complete` could not copy.
        """
        self._copied.wait()
        if self._failure is not None:
            raise self._failure
        yield from self.contents


def sizes_of(contents: Iterable[Content]) -> list[int]:
    """Bytes of the tensors in each file of pieces."""
    return [sum(p.tensor.nbytes for p in content.pieces) for content in contents if isinstance(content, PiecesContent)]


def fits_in_memory(needed: int) -> bool:
    """Whether ``needed`` more bytes on every rank fit into what is free on its machine. Collective: one answer."""
    found = distributed.gather_to_main((socket.gethostname(), int(psutil.virtual_memory().available), needed))
    taken: dict[str, int] = {}
    for host, _, size in found or ():
        taken[host] = taken.get(host, 0) + size
    fits = all(taken[host] <= free * SHARE_OF_FREE_MEMORY for host, free, _ in found or ())
    return bool(distributed.broadcast_object(fits))

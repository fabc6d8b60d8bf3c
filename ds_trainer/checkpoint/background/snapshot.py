"""An engine's state copied into host memory, so that training goes on while it is written.

The copy has the order of the file: writing it is one pass over memory. What only an optimizer step changes (master
weights and optimizer states: nearly all of it) may be copied while the next forward and backward pass runs, as long as
that step waits for the copy. What belongs to the model itself (buffers, frozen weights, and all weights where there
are no masters) is copied at once: a forward pass may change it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import torch

from ds_trainer.checkpoint.background.arena import Arena
from ds_trainer.checkpoint.pieces.content import PiecesContent
from ds_trainer.checkpoint.pieces.file import Arranged, arrange, write_bytes
from ds_trainer.checkpoint.pieces.frozen import FrozenContent
from ds_trainer.checkpoint.pieces.in_place import InPlace, write_in_place
from ds_trainer.checkpoint.pieces.model_plan import StoredTensor
from ds_trainer.checkpoint.protocol.contents import Content
from ds_trainer.checkpoint.protocol.shared_files import SharedFiles
from ds_trainer.engine.state.pieces import Piece
from ds_trainer.parallel.places import Place
from ds_trainer.utils import distributed
from ds_trainer.utils.host_memory import free_host_memory

SHARE_OF_FREE_MEMORY = 0.7
"""Snapshots may take this much of the host memory that is free; the rest is for batches and the page cache."""


@dataclass(frozen=True)
class Copied:
    """A file of pieces in host memory, and this rank's part of the model's files.

    Attributes:
        written: bytes of ``blocks`` that the file holds, from the first on.
        in_model: where a whole tensor lies, which elements of it there are here, of which type, from which byte on.
    """

    name: str
    head: bytes
    blocks: list[torch.Tensor]
    written: int
    in_model: list[tuple[StoredTensor, Place, torch.dtype, int]]

    @classmethod
    def of(cls, name: str, arranged: Arranged, blocks: list[torch.Tensor]) -> Copied:
        """A file whose pieces ``blocks`` hold one after the other."""
        model = [(stored, piece.place, piece.tensor.dtype, at) for stored, piece, at in arranged.in_model]
        return cls(name, arranged.head, blocks, arranged.written, model)

    def write(self, stream: BinaryIO) -> None:
        stream.write(self.head)
        for part in self._bytes(0, self.written):
            write_bytes(stream, part)

    def write_shared(self, files: SharedFiles) -> None:
        pieces = [(stored, place, partial(self._elements, dtype, at)) for stored, place, dtype, at in self.in_model]
        write_in_place(files, [InPlace(*piece) for piece in pieces])

    def _elements(self, dtype: torch.dtype, begin: int, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of what begins at byte ``begin``; a copy where a view cannot have them."""
        parts = list(self._bytes(begin + start * dtype.itemsize, begin + stop * dtype.itemsize))
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
            if isinstance(content, FrozenContent):  # copied once: its memory is let go with this snapshot
                content = self._copy(content, Arena(), 0, lambda piece: False)
            elif isinstance(content, PiecesContent):
                # Pieces of a second file have been swapped in for this moment only.
                content = self._copy(content, arena, files, waits if files == 0 else lambda piece: False)
                files += 1
            self.contents.append(content)
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        if not self._waiting:
            self._copied.set()

    def _copy(self, content: PiecesContent, arena: Arena, index: int, waits: Callable[[Piece], bool]) -> Copied:
        arranged = arrange(content.pieces, content.scalars, content.stored)
        blocks = arena.blocks(index, arranged.size)
        rest = list(blocks)
        for piece in arranged.pieces:
            source = piece.tensor.detach().reshape(-1).view(torch.uint8)
            while source.numel():  # it may go on in the next block
                size = min(source.numel(), rest[0].numel())
                target, part = rest[0][:size], source[:size]
                if waits(piece):
                    self._waiting.append((target, part))
                else:
                    target.copy_(part, non_blocking=self._stream is not None)
                source, rest[0] = source[size:], rest[0][size:]
                if not rest[0].numel():
                    del rest[0]
        return Copied.of(content.name, arranged, blocks)

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
    """Bytes of the tensors in each file of pieces that every save writes; frozen weights are not among them."""
    found = [one for one in contents if isinstance(one, PiecesContent) and not isinstance(one, FrozenContent)]
    return [sum(p.tensor.nbytes for p in content.pieces) for content in found]


def frozen_bytes(contents: Iterable[Content]) -> int:
    """Bytes of the frozen weights, of which the first save has a copy until it is written."""
    return sum(p.tensor.nbytes for one in contents if isinstance(one, FrozenContent) for p in one.pieces)


def fits_in_memory(needed: int) -> bool:
    """Whether ``needed`` more bytes on every rank fit into what is free on its machine. Collective: one answer."""
    found = distributed.gather_to_main((socket.gethostname(), free_host_memory(), needed))
    taken: dict[str, int] = {}
    for host, _, size in found or ():
        taken[host] = taken.get(host, 0) + size
    fits = all(taken[host] <= free * SHARE_OF_FREE_MEMORY for host, free, _ in found or ())
    return bool(distributed.broadcast_object(fits))

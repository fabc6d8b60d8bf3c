"""A copy of the engine's state in host memory, so that training continues while the copy is written.

The copy has the layout of the file, so writing it is one pass over memory. Tensors that only an optimizer step changes
(master weights and optimizer states: nearly everything) may be copied during the next forward and backward pass, as
long as that step waits for the copy. Tensors of the model itself (buffers, frozen weights, and all weights if there are
no masters) are copied at once, because a forward pass may change them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import torch

from ds_trainer.checkpoint.background.staging_buffer import StagingBuffer
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

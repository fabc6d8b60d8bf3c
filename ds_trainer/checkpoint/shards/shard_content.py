"""Shards of tensors as a checkpoint file, and as a part of the model's files in the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

import torch

from ds_trainer.checkpoint.protocol.shared_files import SharedFiles, SharedWriter
from ds_trainer.checkpoint.shards.model_plan import TensorLocation
from ds_trainer.checkpoint.shards.shard_file import LocateInModel, not_in_model, plan_shard_file, write_shard_file
from ds_trainer.engine.state.state_shards import StateShard
from ds_trainer.parallel.shard_slices import Rectangle, ShardSlice


@dataclass(frozen=True)
class ShardContent:
    """Shards of tensors. They are views of the engine's state: the next step changes them.

    Attributes:
        name: the file's name.
        shards: the tensors.
        scalars: single-value states of parameters: ``{parameter: {key: value}}``.
        locate: tells where the model's files hold the elements of a shard.
    """

    name: str
    shards: Sequence[StateShard]
    scalars: Mapping[str, Mapping[str, Any]]
    locate: LocateInModel = not_in_model

    def write(self, stream: BinaryIO) -> None:
        """Write the content to ``stream``."""
        write_shard_file(stream, self.shards, self.scalars, self.locate)

    def write_shared(self, files: SharedFiles) -> None:
        """Write the elements that shared files hold."""
        in_model = plan_shard_file(self.shards, {}, self.locate).in_model
        writes = [InPlaceWrite(stored, shard.slice, partial(_elements, shard)) for stored, shard, _ in in_model]
        write_in_place(files, writes)


def _elements(shard: StateShard, start: int, stop: int) -> torch.Tensor:
    return shard.tensor.detach().reshape(-1)[start:stop]


_CHUNK = 4 * 2**20  # elements converted at a time
_LONG_ROW = 2**18  # bytes from which each row is converted and written separately

Elements = Callable[[int, int], torch.Tensor]
"""``elements(start, stop)`` returns a range of a shard's elements: flat, on any device, of any type."""


class InPlaceWrite(NamedTuple):
    """A shard to write into the model's files.

    Attributes:
        stored: where the whole tensor is stored.
        slice: which of its elements the shard has.
        elements: returns elements of the shard, counted from its first one.
    """

    stored: TensorLocation
    slice: ShardSlice
    elements: Elements


def write_in_place(files: SharedFiles, writes: Sequence[InPlaceWrite]) -> None:
    """Write shards, rounded to the type of the files. Opens each file once.

    A slice along an inner dimension takes one write per row, because the file holds whole rows.

    Args:
        files: the checkpoint's shared files.
        writes: sorted by file.
    """
    for name, of_file in groupby(writes, lambda write: write.stored.file):
        with files.open(name) as writer:
            for stored, slice_, elements in of_file:
                for source, target in slice_.common(ShardSlice.whole(slice_.shape)):
                    _write_rectangle(writer, stored, source, target, elements)


def _write_rectangle(
    writer: SharedWriter, stored: TensorLocation, source: Rectangle, target: Rectangle, elements: Elements
) -> None:
    size = stored.dtype.itemsize
    offset = stored.offset + target.offset * size
    rows, columns = target.rows, target.columns
    if rows == 1 or columns == source.stride == target.stride:
        writer.write(offset, _converted(source.offset, rows * columns, stored.dtype, elements))
    elif columns * size >= _LONG_ROW:
        for row in range(rows):
            start = source.offset + row * source.stride
            writer.write(offset + row * target.stride * size, _converted(start, columns, stored.dtype, elements))
    else:
        step = max(1, _CHUNK // source.stride)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            start = source.offset + row * source.stride
            chunk = elements(start, start + (count - 1) * source.stride + columns)
            matrix = chunk.as_strided((count, columns), (source.stride, 1), chunk.storage_offset())
            lines = matrix.to(stored.dtype).contiguous().cpu().view(torch.uint8)
            writer.write_rows(offset + row * target.stride * size, target.stride * size, lines.numpy())


def _converted(start: int, count: int, dtype: torch.dtype, elements: Elements) -> Iterator[memoryview]:
    for first in range(start, start + count, _CHUNK):
        chunk = elements(first, min(first + _CHUNK, start + count))
        yield chunk.to(dtype).contiguous().cpu().view(torch.uint8).numpy().data

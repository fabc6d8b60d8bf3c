"""Elements of whole tensors, written where they belong in the model's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.pieces.model_plan import StoredTensor
from ds_trainer.checkpoint.protocol.shared_files import SharedFiles, SharedWriter
from ds_trainer.parallel.places import Place, Rectangle

_CHUNK = 4 * 2**20  # elements that are converted at a time
_LONG = 2**18  # bytes from which a row is written by itself

Elements = Callable[[int, int], torch.Tensor]
"""``elements(start, stop)``: some elements of a piece, flat, on any device, of any type."""


class InPlace(NamedTuple):
    """A piece of a tensor that belongs into the model's files.

    Attributes:
        stored: where the whole tensor lies.
        place: which elements of it the piece has.
        elements: of the piece, counted from its first.
    """

    stored: StoredTensor
    place: Place
    elements: Elements


def write_in_place(files: SharedFiles, pieces: Sequence[InPlace]) -> None:
    """Write pieces of tensors, rounded to the type that the files have; each file is opened once.

    Of a slice along an inner dimension every row is written by itself, as the file holds whole rows.

    Args:
        files: of the checkpoint.
        pieces: in the order of the files.
    """
    for name, of_file in groupby(pieces, lambda piece: piece.stored.file):
        with files.open(name) as writer:
            for stored, place, elements in of_file:
                for mine, there in place.common(Place.whole(place.shape)):
                    _write_rectangle(writer, stored, mine, there, elements)


def _write_rectangle(
    writer: SharedWriter, stored: StoredTensor, mine: Rectangle, there: Rectangle, elements: Elements
) -> None:
    size = stored.dtype.itemsize
    at = stored.offset + there.offset * size
    rows, columns = there.rows, there.columns
    if rows == 1 or columns == mine.stride == there.stride:
        writer.write(at, _run(mine.offset, rows * columns, stored.dtype, elements))
    elif columns * size >= _LONG:
        for row in range(rows):
            start = mine.offset + row * mine.stride
            writer.write(at + row * there.stride * size, _run(start, columns, stored.dtype, elements))
    else:
        step = max(1, _CHUNK // mine.stride)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            start = mine.offset + row * mine.stride
            some = elements(start, start + (count - 1) * mine.stride + columns)
            matrix = some.as_strided((count, columns), (mine.stride, 1), some.storage_offset())
            lines = matrix.to(stored.dtype).contiguous().cpu().view(torch.uint8)
            writer.write_rows(at + row * there.stride * size, there.stride * size, lines.numpy())


def _run(start: int, count: int, dtype: torch.dtype, elements: Elements) -> Iterator[memoryview]:
    for first in range(start, start + count, _CHUNK):
        some = elements(first, min(first + _CHUNK, start + count))
        yield some.to(dtype).contiguous().cpu().view(torch.uint8).numpy().data

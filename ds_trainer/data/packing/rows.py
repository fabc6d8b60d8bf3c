"""Which samples, or parts of samples, share a row of ``max_length`` tokens. Arithmetic on lengths only.

Two strategies: *best fit* puts every sample whole into the row with the least room that has enough, the longest sample
first (best-fit decreasing), within windows of samples; a sample that is longer than a row is truncated. *Cut*
concatenates the samples in order and cuts every ``max_length`` tokens, so a sample may continue in the next row, as a
sample of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.order import Order
from ds_trainer.utils.units import counted

Integers = npt.NDArray[np.int64]

WINDOW_ROWS = 256
"""Rows whose tokens are packed together: few enough for the memory of a stream, and the last row alone is not full."""


@dataclass(frozen=True)
class PackingSummary:
    """What packing did with the samples.

    Attributes:
        max_length: tokens of a row.
        samples: samples with at least one token.
        rows: rows.
        pieces: samples and parts of samples in the rows.
        tokens: tokens in the rows, without padding.
        dropped: tokens of samples that are longer than a row, beyond its end (best fit).
        cut: pieces that continue a sample of another row (cut): each has lost its context.
    """

    max_length: int
    samples: int = 0
    rows: int = 0
    pieces: int = 0
    tokens: int = 0
    dropped: int = 0
    cut: int = 0

    @property
    def fill(self) -> float:
        """The share of the rows that is not padding."""
        return self.tokens / (self.rows * self.max_length) if self.rows else 0.0

    @property
    def samples_per_row(self) -> float:
        """Samples, and parts of samples, in a row on average."""
        return self.pieces / self.rows if self.rows else 0.0

    def __add__(self, other: PackingSummary) -> PackingSummary:
        mine, yours = (list(vars(summary).values())[1:] for summary in (self, other))
        return PackingSummary(self.max_length, *(a + b for a, b in zip(mine, yours, strict=True)))

    def text(self) -> str:
        """One line for a header or a log."""
        parts = [
            f"{counted(self.samples, 'sample')} in {counted(self.rows, 'row')} of {self.max_length:,} tokens",
            f"{100 * self.fill:.1f} % filled",
            f"{100 * (1 - self.fill):.1f} % padding",
            f"{self.samples_per_row:.1f} samples a row",
            f"{self.dropped:,} tokens dropped",
        ]
        return ", ".join(parts + ([f"cut between rows: {counted(self.cut, 'sample')}"] if self.cut else []))

    def metrics(self, prefix: str = "packing") -> dict[str, float]:
        """The same as numbers, by log key."""
        return {
            f"{prefix}_fill": round(self.fill, 4),
            f"{prefix}_padding": round(1 - self.fill, 4),
            f"{prefix}_samples_per_row": round(self.samples_per_row, 2),
            f"{prefix}_dropped_tokens": self.dropped,
        }


@dataclass(frozen=True)
class PackedRows:
    """The contents of rows. Piece ``p`` is the tokens ``starts[p]`` to ``starts[p] + lengths[p] - 1`` of a sample.

    Attributes:
        samples: the sample of each piece, int64 ``[pieces]``.
        starts, lengths: its first token and its number of tokens, int32 ``[pieces]``.
        offsets: row ``r`` has the pieces ``offsets[r]`` to ``offsets[r + 1] - 1``; int64 ``[rows + 1]``.
        summary: counts.
    """

    samples: Integers
    starts: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    offsets: Integers
    summary: PackingSummary

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Sample, start and length of each piece of a row."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        columns = (self.samples[part].tolist(), self.starts[part].tolist(), self.lengths[part].tolist())
        return zip(*columns, strict=True)


def packed_rows(
    lengths: npt.ArrayLike, max_length: int, strategy: PackingStrategy, order: Order | None = None, seed: int = 0
) -> PackedRows:
    """Pack all samples of a dataset. The result depends on the arguments alone.

    Args:
        lengths: tokens of each sample; samples without tokens are left out.
        max_length: tokens of a row.
        strategy: how samples are chosen for a row.
        order: the order in which samples are taken; default: that of the dataset.
        seed: decides the order of the rows within a window (best fit).
    """
    sizes = np.asarray(lengths, np.int64)
    taken = np.arange(len(sizes)) if order is None else order.at(np.arange(len(sizes)))
    parts = []
    for number, window in enumerate(_windows(sizes[taken], max_length, strategy)):
        part = packed_window(sizes[taken[window]], max_length, strategy, (seed, 0, number))
        parts.append((taken[window][part.samples], part))
    if len(parts) == 1:
        samples, part = parts[0]
        return PackedRows(samples, part.starts, part.lengths, part.offsets, part.summary)
    summary = PackingSummary(max_length)
    ends = [np.zeros(1, np.int64)]
    for _, part in parts:
        ends.append(part.offsets[1:] + ends[-1][-1])
        summary = summary + part.summary
    if not parts:
        empty = np.zeros(0, np.int32)
        return PackedRows(ends[0][:0], empty, empty, ends[0], summary)
    return PackedRows(
        np.concatenate([samples for samples, _ in parts]),
        np.concatenate([part.starts for _, part in parts]),
        np.concatenate([part.lengths for _, part in parts]),
        np.concatenate(ends),
        summary,
    )


def _windows(lengths: Integers, max_length: int, strategy: PackingStrategy) -> Iterator[slice]:
    """Windows of about :data:`WINDOW_ROWS` rows of tokens; one window if samples are cut in order."""
    if strategy == PackingStrategy.CUT:
        yield slice(0, len(lengths))
        return
    ends = np.cumsum(np.minimum(lengths, max_length))
    start = 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        # The sample that reaches the size is the last one, as in a stream.
        stop = int(np.searchsorted(ends, before + WINDOW_ROWS * max_length)) + 1
        yield slice(start, stop)
        start = stop


def packed_window(
    lengths: npt.ArrayLike, max_length: int, strategy: PackingStrategy, seed: tuple[int, ...]
) -> PackedRows:
    """Pack the samples of one window, numbered from 0.

    Args:
        lengths: tokens of each sample.
        max_length: tokens of a row.
        strategy: how samples are chosen for a row.
        seed: decides the order of the rows (best fit): in the order of packing, the longest samples would come first.
    """
    sizes = np.asarray(lengths, np.int64)
    if strategy == PackingStrategy.CUT:
        return _cut(sizes, max_length)
    samples = np.flatnonzero(sizes)
    kept = np.minimum(sizes[samples], max_length)
    rows = best_fit_decreasing(kept, max_length)
    count = int(rows.max()) + 1 if len(rows) else 0
    rows = np.random.default_rng(seed).permutation(count)[rows]
    by_row = np.argsort(rows, kind="stable")
    summary = PackingSummary(
        max_length, len(samples), count, len(samples), int(kept.sum()), int((sizes[samples] - kept).sum())
    )
    return PackedRows(
        samples[by_row],
        np.zeros(len(samples), np.int32),
        kept[by_row].astype(np.int32),
        np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))]).astype(np.int64),
        summary,
    )


def _cut(lengths: Integers, max_length: int) -> PackedRows:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    edges = np.unique(np.concatenate([[0], ends, np.arange(0, total, max_length)])).astype(np.int64)
    first = edges[:-1]
    samples = np.searchsorted(ends, first, side="right")
    starts = first - (ends[samples] - lengths[samples])
    rows = first // max_length
    count = -(-total // max_length)
    summary = PackingSummary(
        max_length=max_length,
        samples=int((lengths > 0).sum()),
        rows=count,
        pieces=len(first),
        tokens=total,
        dropped=0,
        cut=int((starts > 0).sum()),
    )
    return PackedRows(
        samples,
        starts.astype(np.int32),
        np.diff(edges).astype(np.int32),
        np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))]).astype(np.int64),
        summary,
    )


def best_fit_decreasing(lengths: Integers, capacity: int) -> Integers:
    """The row of each sample: the one with the least room that has enough, else a new one; the longest sample first.

    About a microsecond a sample: the rows are kept by their room, and which rooms occur are the bits of one integer.

    Args:
        lengths: tokens of each sample, from 1 to ``capacity``.
        capacity: tokens of a row.
    """
    order = np.argsort(-lengths, kind="stable")
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set if a row has room for exactly r tokens
    row_of = np.empty(len(lengths), np.int64)
    rows = 0
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            same = by_room[room]
            row = same.pop()
            if not same:
                rooms ^= 1 << room
        else:
            row, room = rows, capacity
            rows += 1
        room -= length
        if room:
            same = by_room.setdefault(room, [])
            if not same:
                rooms |= 1 << room
            same.append(row)
        row_of[sample] = row
    return row_of

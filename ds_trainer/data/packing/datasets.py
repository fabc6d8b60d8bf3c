"""Datasets whose samples are packed rows: map-style (``PackedDataset``) and streams (``PackedStream``).

Everything that reads samples by position (sampler, resume, layouts) then works on rows: the order of an epoch is an
order of rows, and a micro-batch is ``per_device_train_batch_size`` rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.packing.rows import WINDOW_ROWS, PackedRows, PackingSummary, packed_window
from ds_trainer.data.packing.token_counts import token_count
from ds_trainer.data.stream import has_state
from ds_trainer.data.stream_shards import shards_in


class Piece(NamedTuple):
    """A sample, or a part of it, in a row.

    Attributes:
        sample: the whole sample.
        start: index of its first token in the row, without padding.
        length: number of tokens in the row.
        whole: tokens of the whole sample, which are checked when it is read.
    """

    sample: Any
    start: int
    length: int
    whole: int | None


Row = list[Piece]


class PackedDataset(Dataset[Row]):
    """A map-style dataset of rows.

    Args:
        dataset: the samples.
        rows: which of them share a row.
        counts: tokens of each sample when the rows were made.
    """

    def __init__(self, dataset: Any, rows: PackedRows, counts: Any) -> None:
        self.dataset = dataset
        self.rows = rows
        self._counts = counts

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def summary(self) -> PackingSummary:
        """Counts of all rows."""
        return self.rows.summary

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Row]:
        """The rows at ``indices``; their samples are read together if the dataset can."""
        pieces = [list(self.rows.row(index)) for index in indices]
        wanted = [sample for row in pieces for sample, _, _ in row]
        read = getattr(self.dataset, "__getitems__", None)
        samples = iter(read(wanted) if callable(read) else [self.dataset[index] for index in wanted])
        return [
            [Piece(next(samples), start, length, int(self._counts[index])) for index, start, length in row]
            for row in pieces
        ]

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the dataset, if it takes it."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class PackedStream(IterableDataset[Row]):
    """A stream of rows: the samples of a window of the stream are packed together, and read in memory meanwhile.

    The rows of a window depend on its samples, the seed and the number of the window alone. The last row of a window
    may have room.

    Args:
        stream: the samples.
        max_length: tokens of a row.
        strategy: how samples are chosen for a row.
        seed: decides the order of the rows within a window.
    """

    def __init__(self, stream: Any, max_length: int, strategy: PackingStrategy, seed: int = 0) -> None:
        self.stream = stream
        self.max_length = max_length
        self.strategy = strategy
        self.seed = seed
        self.epoch = 0
        # Shared with the worker that reads: samples, rows, pieces, tokens, dropped, cut.
        self._counts = torch.zeros(6, dtype=torch.int64).share_memory_()
        self._restored: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None

    @property
    def num_shards(self) -> int:
        """Shards that can be packed each by itself."""
        return shards_in(self.stream)

    def shard(self, num_shards: int, index: int) -> PackedStream:
        """The rows of a shard; its counts are added to those of this stream."""
        inner = self.stream.shard(num_shards=num_shards, index=index)
        rows = packed_stream(inner, self.max_length, self.strategy, self.seed)
        rows._counts = self._counts
        return rows

    @property
    def summary(self) -> PackingSummary:
        """Counts of the windows read so far, since the run began or resumed."""
        return PackingSummary(self.max_length, *self._counts.tolist())

    @property
    def generator(self) -> Any:
        """The generator of the stream, which is seeded for every epoch; None if it has none."""
        return getattr(self.stream, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch
        set_epoch = getattr(self.stream, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Row]:
        at, self._restored = self._restored, None
        number, done = (0, 0) if at is None else (at["window"], at["rows"])
        if at is not None:
            self.stream.load_state_dict(copy.deepcopy(at["stream"]))
        source = iter(self.stream)
        while True:
            state = self._state_of_stream()
            samples, counts = self._window(source)
            if not samples:
                return
            packed = packed_window(counts, self.max_length, self.strategy, (self.seed, self.epoch, number))
            self._counts += torch.tensor(list(vars(packed.summary).values())[1:])
            for index in range(done, len(packed)):
                self._position = {"stream": state, "window": number, "rows": index + 1}
                yield [
                    Piece(samples[sample], start, length, counts[sample]) for sample, start, length in packed.row(index)
                ]
            number, done = number + 1, 0

    def _window(self, source: Iterator[Any]) -> tuple[list[Any], list[int]]:
        samples: list[Any] = []
        counts: list[int] = []
        tokens = 0
        while tokens < WINDOW_ROWS * self.max_length:
            sample = next(source, None)
            if sample is None:
                break
            samples.append(sample)
            counts.append(token_count(sample))
            tokens += min(counts[-1], self.max_length) if self.strategy == PackingStrategy.BEST_FIT else counts[-1]
        return samples, counts

    def _state_of_stream(self) -> Any:
        return None


class StatefulPackedStream(PackedStream):
    """Rows of a stream that can save its position: a resumed run reads one window again, not the whole epoch."""

    def _state_of_stream(self) -> Any:
        return copy.deepcopy(self.stream.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The position after the last row: the state of the stream at the beginning of its window, rows since then."""
        position = self._position or {"stream": self.stream.state_dict(), "window": 0, "rows": 0}
        return copy.deepcopy(position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at the position of ``state``."""
        self._restored = state


def packed_stream(stream: Any, max_length: int, strategy: PackingStrategy, seed: int = 0) -> PackedStream:
    """The rows of ``stream``, with a state if it has one."""
    kind = StatefulPackedStream if has_state(stream) else PackedStream
    return kind(stream, max_length, strategy, seed)

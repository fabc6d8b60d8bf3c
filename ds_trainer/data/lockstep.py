"""Keeps ranks in lockstep that read data of unknown length: they end together and read the same data."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ds_trainer.data.sharded_batch import dummy_of
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

SPARE, EMPTY, RAGGED, WHOLE = range(4)
"""Of an item of :class:`Aligned`: none of a micro-step but to make a dummy of, a dummy, with fewer samples than the
others, and with all samples."""
_FEW, _MANY = 16, 0.1  # micro-steps of an epoch, and a part of them, of which nothing needs to be said


class Lockstep(Iterator[Any]):
    """An iterator that fetches ``window`` items at a time and compares them with the other ranks' items.

    Args:
        source: pairs of an item and a checksum that must be equal on all ranks (0 if there is none).
        window: items per comparison; usually those of one optimizer step.

    Raises:
        ConfigError: on all ranks, if their sources have different lengths or the checksums differ.
    """

    def __init__(self, source: Iterator[tuple[Any, int]], window: int) -> None:
        self._source = source
        self._window = window
        self._fetched: list[Any] = []
        self._taken = 0
        self._ended = False

    def __next__(self) -> Any:
        if self.ahead() == 0:
            raise StopIteration
        self._taken += 1
        return self._fetched.pop(0)

    def ahead(self) -> int:
        """Number of fetched items: 1 to ``window``, or 0 at the end. Collective when a new window is fetched."""
        if not self._fetched and not self._ended:
            self._fetched = self._fetch()
            self._ended = len(self._fetched) < self._window
        return len(self._fetched)

    def _fetch(self) -> list[Any]:
        pairs = list(itertools.islice(self._source, self._window))
        checksum = 0
        for _, item_checksum in pairs:
            checksum = zlib.crc32(item_checksum.to_bytes(4, "little"), checksum)
        self._compare(len(pairs), checksum)
        return [item for item, _ in pairs]

    def _compare(self, count: int, checksum: int) -> None:
        if distributed.world_size() == 1:
            return
        most, least, highest, lowest = distributed.agree(torch.tensor([count, -count, checksum, -checksum]))
        if most != -least:
            batches = [self._taken + other for other in distributed.gather_objects(count)]
            raise ConfigError(
                f"The ranks' data has different lengths: they have read {batches} of its batches. Give every rank "
                "the same data in the same order; each rank selects its own samples. Data that gives each replica its "
                "own samples needs stream_shards='own'."
            )
        if highest != -lowest:
            raise ConfigError(
                f"The ranks read different data after batch {self._taken}. Every rank reads the whole stream and "
                "selects its samples, so do not split the stream by rank (or set stream_shards='own', if it gives each "
                "data-parallel replica its own samples), and make its randomness equal on all ranks: with a "
                "torch.Generator in its attribute `generator`, which is seeded for every epoch, or with set_epoch()."
            )


class Aligned(Lockstep):
    """An iterator over items that differ from rank to rank: a rank whose items have ended gives dummies until all have.

    A window of dummies on all ranks is left out: an optimizer step without samples would still move the weights.

    Args:
        source: pairs of an item and ``SPARE``, ``EMPTY``, ``RAGGED`` or ``WHOLE``.
        window: what :class:`Lockstep` takes.
        drop_last: end before the first item that is not whole on every rank.

    Raises:
        ConfigError: on all ranks, if one has nothing of which a dummy could be made.
    """

    def __init__(self, source: Iterator[tuple[Any, int]], window: int, drop_last: bool = False) -> None:
        super().__init__(source, window)
        self._drop_last = drop_last
        self._last: list[Any] = []
        self._ragged = 0
        self._left_out = 0

    def _fetch(self) -> list[Any]:
        while (items := self._fetch_window()) is None:
            self._left_out += self._window
        return items

    def take_left_out(self) -> int:
        """How many items were left out since the last call."""
        count, self._left_out = self._left_out, 0
        return count

    def _fetch_window(self) -> list[Any] | None:
        items: list[Any] = []
        whole = real = 0
        while len(items) < self._window and (pair := next(self._source, None)) is not None:
            item, kind = pair
            self._last = [item]
            if kind == SPARE:
                continue
            whole += kind == WHOLE and whole == len(items)
            real |= kind != EMPTY
            items.append(item)
        votes = torch.tensor([len(items), int(not self._last), -whole, real])
        most, missing, fewest, some_real = distributed.agree(votes)
        if most and missing:
            raise ConfigError(
                "The training data of at least one replica is empty, while that of others is not. Give every replica "
                "at least one sample."
            )
        count = -fewest if self._drop_last else most
        if count and not some_real:
            return None
        items = items[:count]
        items += [dummy_of(self._last[0]) for _ in range(len(items), count)]
        self._ragged += count + fewest
        if count < self._window:
            self._report(self._taken + count)
            self._last.clear()
        return items

    def _report(self, taken: int) -> None:
        if self._ragged > max(_FEW, _MANY * taken) and distributed.rank() == 0:
            logger.warning(
                "In %d of the %d micro-steps of this epoch some replicas had fewer samples or none, because the shards "
                "of the stream differ in length. No sample is lost, but these replicas wait. Shards of equal length, "
                "or more of them, avoid that.",
                *(self._ragged, taken),
            )


def fingerprint(sample: Any) -> int:
    """A 32-bit checksum of a sample's numbers and strings, and of the types of its other contents."""
    return _checksum(sample, 0)


def _checksum(value: Any, mark: int) -> int:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            mark = _checksum(value[key], zlib.crc32(str(key).encode(), mark))
        return mark
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for item in value:
            mark = _checksum(item, mark)
        return mark
    if type(value) is torch.Tensor:  # another one may be computed when it is read, as the mask of packed rows
        plain = value.detach().cpu().contiguous().flatten()
        return zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), mark)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), mark)
    if isinstance(value, (str, int, float, bytes, list, tuple)) or value is None:
        return zlib.crc32(repr(value).encode(), mark)
    return zlib.crc32(type(value).__name__.encode(), mark)

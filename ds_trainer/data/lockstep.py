"""Keeps ranks in lockstep that read data of unknown length: they end together and read the same data."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError


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
            pairs = list(itertools.islice(self._source, self._window))
            checksum = 0
            for _, item_checksum in pairs:
                checksum = zlib.crc32(item_checksum.to_bytes(4, "little"), checksum)
            self._compare(len(pairs), checksum)
            self._fetched = [item for item, _ in pairs]
            self._ended = len(pairs) < self._window
        return len(self._fetched)

    def _compare(self, count: int, checksum: int) -> None:
        if distributed.world_size() == 1:
            return
        most, least, highest, lowest = distributed.agree(torch.tensor([count, -count, checksum, -checksum]))
        if most != -least:
            batches = [self._taken + other for other in distributed.gather_objects(count)]
            raise ConfigError(
                f"The ranks' data has different lengths: the ranks have read {batches} batches. Give every rank "
                "the same data in the same order; each rank selects its own samples."
            )
        if highest != -lowest:
            raise ConfigError(
                f"The ranks read different data after batch {self._taken}. Every rank reads the whole stream and "
                "selects its samples, so do not split the stream by rank, and make its randomness equal on all ranks: "
                "with a torch.Generator in its attribute `generator`, which is seeded for every epoch, or with "
                "set_epoch()."
            )

"""Ranks that read data of unknown length make sure that they end together, and that they read the same."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError


class Lockstep(Iterator[Any]):
    """An iterator that fetches ``window`` items at a time and compares notes with the other ranks after each window.

    Args:
        source: pairs of an item and a mark that must be the same on all ranks (0 where nothing can be said).
        window: items of one optimizer step, or any number.

    Raises:
        ConfigError: on all ranks, where their sources end at different places or the marks differ.
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
        """Items that all ranks have at hand: 1 to ``window``, or 0 at the end. Collective when the last are used up."""
        if not self._fetched and not self._ended:
            pairs = list(itertools.islice(self._source, self._window))
            mark = 0
            for _, own in pairs:
                mark = zlib.crc32(own.to_bytes(4, "little"), mark)
            self._compare(len(pairs), mark)
            self._fetched = [item for item, _ in pairs]
            self._ended = len(pairs) < self._window
        return len(self._fetched)

    def _compare(self, count: int, mark: int) -> None:
        if distributed.world_size() == 1:
            return
        most, least, highest, lowest = distributed.agree(torch.tensor([count, -count, mark, -mark]))
        if most != -least:
            rounds = [self._taken + other for other in distributed.gather_objects(count)]
            raise ConfigError(
                f"The ranks' data ends at different places: batches read over the ranks are {rounds}. Every rank must "
                "be given the same data in the same order, and takes its own share of it."
            )
        if highest != -lowest:
            raise ConfigError(
                f"The ranks read different data after batch {self._taken}. Every rank reads the whole stream and keeps "
                "its share, so do not split it by rank, and make what is random in it the same on all ranks: by a "
                "torch.Generator in its attribute `generator`, which is seeded for every epoch, or by set_epoch()."
            )

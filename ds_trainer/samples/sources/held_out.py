"""The split of records into training and evaluation, by their content.

A record is on one side because of what it says, not because of where it is: the split is the same in every run and on
every rank, stays when files are reordered, and equal records are on the same side, so that nothing is evaluated on
what was trained on.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable
from typing import Any

from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

_RANGE = 2**64


def digest(record: Record) -> int:
    """A number below 2**64 that depends on kind and fields of ``record`` alone."""
    content = json.dumps([record.kind, record.fields], sort_keys=True, default=_as_text)
    return int.from_bytes(hashlib.blake2b(content.encode("utf-8"), digest_size=8).digest(), "big")


def _as_text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


class HeldOut:
    """Says which records are held out for evaluation.

    Args:
        limit: records whose :func:`digest` is below this number are.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    @classmethod
    def share(cls, share: float) -> HeldOut:
        """About this share of the records, above 0 and below 1."""
        return cls(int(share * _RANGE))

    @classmethod
    def count(cls, count: int, records: Iterable[Record]) -> HeldOut:
        """``count`` of ``records``, and those that are equal to one of them. Keeps ``count`` numbers in memory.

        Raises:
            ConfigError: there are not more than ``count`` different records.
        """
        smallest: list[int] = []  # a heap of negative numbers: the largest of the smallest comes first
        kept: set[int] = set()
        seen = 0
        for record in records:
            seen += 1
            number = digest(record)
            if number in kept:
                continue
            if len(smallest) <= count:
                heapq.heappush(smallest, -number)
                kept.add(number)
            elif number < -smallest[0]:
                kept.discard(-heapq.heapreplace(smallest, -number))
                kept.add(number)
        if len(smallest) <= count:
            raise ConfigError(
                f"data.held_out={count} leaves nothing to train on: there are {counted(seen, 'record')}, "
                f"{len(smallest):,} of them different."
            )
        return cls(-smallest[0])

    @property
    def portion(self) -> float:
        """The part of all possible records that is held out, 0 to 1."""
        return self.limit / _RANGE

    def takes(self, record: Record) -> bool:
        """Whether ``record`` is held out."""
        return digest(record) < self.limit

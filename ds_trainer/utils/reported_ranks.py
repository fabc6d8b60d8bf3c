"""The number of ranks that user code reads, and whether it has read it.

A ``compute_loss`` written for transformers divides by ``num_items_in_batch`` and multiplies by the number of processes,
because there gradients are averaged over ranks. To recognize this, its loss is computed a second time while another
number is reported (:mod:`ds_trainer.training.loop.first_loss`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_reported: int | None = None
_reads = 0


def for_user_code(ranks: int) -> int:
    """``ranks``, or the number that :func:`reporting` has set; counts as a read."""
    global _reads
    _reads += 1
    return ranks if _reported is None else _reported


def reads() -> int:
    """How often the number has been read in this process."""
    return _reads


@contextmanager
def reporting(ranks: int) -> Iterator[None]:
    """Report this number inside."""
    global _reported
    _reported = ranks
    try:
        yield
    finally:
        _reported = None

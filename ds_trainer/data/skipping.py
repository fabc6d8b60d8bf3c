"""Skips data that a run has already read, if there is no faster way to resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_trainer.utils.seeds import random_state, restore_random_state

_SHOWN_FROM = 100  # fewer items are read before a bar could be seen


def skip(items: Iterator[Any], count: int, what: str, show: bool) -> int:
    """Read and drop up to ``count`` items. Returns how many there were.

    Args:
        items: the items.
        count: number of items to skip.
        what: their name on the progress bar.
        show: whether this process shows a progress bar.
    """
    from tqdm.auto import tqdm

    taken = itertools.islice(items, count)
    quiet = not show or count < _SHOWN_FROM
    return sum(1 for _ in tqdm(taken, "Skipping data already trained on", count, unit=f" {what}", disable=quiet))


@contextmanager
def with_random_state(state: dict[str, Any] | None) -> Iterator[None]:
    """Set the global generators to ``state`` inside (None leaves them unchanged), and restore them afterwards.

    So an order that is drawn from the global generators when reading begins is the same as the first time.
    """
    outside = random_state()
    if state is not None:
        restore_random_state(state)
    try:
        yield
    finally:
        restore_random_state(outside)

"""Reading over what a run has had already, where there is no quicker way to the place where it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_trainer.utils.seeds import random_state, restore_random_state

_SHOWN_FROM = 100  # less is done before a bar could be read


def skip(items: Iterator[Any], count: int, what: str, show: bool) -> int:
    """Take up to ``count`` items and leave them; how many there were.

    Args:
        items: what is read.
        count: how many.
        what: their name on the progress bar.
        show: whether this process shows one.
    """
    from tqdm.auto import tqdm

    taken = itertools.islice(items, count)
    quiet = not show or count < _SHOWN_FROM
    return sum(1 for _ in tqdm(taken, "Reading over what was trained on", count, unit=f" {what}", disable=quiet))


@contextmanager
def as_if_at(state: dict[str, Any] | None) -> Iterator[None]:
    """Inside, the generators begin with ``state`` (None leaves them); afterwards they are as before.

    An order that is drawn from the global generators when reading begins comes out as it did the first time.
    """
    outside = random_state()
    if state is not None:
        restore_random_state(state)
    try:
        yield
    finally:
        restore_random_state(outside)

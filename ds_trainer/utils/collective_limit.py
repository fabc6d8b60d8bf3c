"""The time limit of collectives: the one that the first process group of this process was started with."""

from __future__ import annotations

from datetime import timedelta

_limit = timedelta(minutes=30)


def collective_limit() -> timedelta:
    """The limit; torch's default before there is a group."""
    return _limit


def set_collective_limit(limit: timedelta) -> None:
    """Set the limit. Existing groups keep theirs (:func:`ds_trainer.engine.process_group.limit_collectives`)."""
    global _limit
    _limit = limit

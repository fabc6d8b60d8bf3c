"""How long collectives of this process may take: what its first process group was started with."""

from __future__ import annotations

from datetime import timedelta

_limit = timedelta(minutes=30)


def collective_limit() -> timedelta:
    """The limit; torch's own default before there is a group."""
    return _limit


def set_collective_limit(limit: timedelta) -> None:
    """Remember the limit; groups that exist keep theirs (:func:`ds_trainer.engine.process_group.limit_collectives`)."""
    global _limit
    _limit = limit

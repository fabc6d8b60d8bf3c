"""``StopVote``: all ranks learn at the same step whether one of them has been asked to stop, and nobody waits for it.

At a step boundary each rank puts its wish into a vote that runs beside the next step; its result is read at the
boundary after that. The device is not asked (:mod:`ds_trainer.utils.host_votes`). Votes are a fraction of a second
apart: when the next one is, is voted on too, since clocks differ and steps do not.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_trainer.training.stopping.request import StopRequest, decode, encode
from ds_trainer.utils.host_votes import HostVotes

SECONDS_BETWEEN = 0.25


class StopVote:
    """One training's votes.

    Args:
        votes: how all ranks vote; None for one process.
    """

    def __init__(self, votes: HostVotes | None) -> None:
        self._votes = votes
        self._pending: Callable[[], list[int]] | None = None
        self._next = 0
        self._paced = True  # whether the vote under way knows how long steps are now

    def is_due(self, step: int) -> bool:
        """Whether ranks vote at this boundary, or read a vote."""
        return self._pending is not None or step >= self._next

    def now(self, wish: StopRequest | None) -> StopRequest | None:
        """Vote and wait for the others. Collective."""
        return wish if self._votes is None else decode(self._votes.begin(encode(wish))())

    def at(self, step: int, wish: StopRequest | None, step_seconds: float) -> StopRequest | None:
        """At a step boundary: what was agreed since the last one; begin another vote. Collective.

        Args:
            step: how many there have been; the same on all ranks, and never less than before.
            wish: of this rank.
            step_seconds: what a step takes.
        """
        if self._votes is None:
            return wish
        if self._pending is not None:
            agreed = self.finish()
            if agreed is not None:
                return agreed
        if step >= self._next:
            self._paced = True
            wait = max(1, int(SECONDS_BETWEEN / step_seconds)) if step_seconds > 0 else 1
            self._pending = self._votes.begin([*encode(wish), wait])
            self._asked_at = step
        return None

    def change_pace(self) -> None:
        """Steps take another time from now on: vote at the next one. On all ranks at the same boundary."""
        self._next, self._paced = 0, False

    def finish(self) -> StopRequest | None:
        """Wait for the vote under way, if there is one, and read it."""
        if self._pending is None:
            return None
        result, self._pending = self._pending, None
        *request, wait = result()
        self._next = self._asked_at + (wait if self._paced else 0)
        return decode(request)

"""``StopVote``: all ranks learn at the same step whether one of them has received a request to stop. No rank waits.

At a step boundary each rank puts its request into a vote that runs during the next step. The result is read at the
boundary after that step. Votes use the host only (:mod:`ds_trainer.utils.host_votes`). They are a fraction of a second
apart. Ranks also vote on the step of the next vote, because their clocks differ and their step counts do not.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_trainer.training.stopping.request import StopRequest, decode, encode
from ds_trainer.utils.host_votes import HostVotes

SECONDS_BETWEEN = 0.25


class StopVote:
    """The votes of one training.

    Args:
        votes: how all ranks vote; None for one process.
    """

    def __init__(self, votes: HostVotes | None) -> None:
        self._votes = votes
        self._pending: Callable[[], list[int]] | None = None
        self._next = 0
        self._paced = True  # whether the vote in progress was begun with the current step duration

    def is_due(self, step: int) -> bool:
        """Whether ranks begin or read a vote at this boundary."""
        return self._pending is not None or step >= self._next

    def now(self, request: StopRequest | None) -> StopRequest | None:
        """Vote and wait for the other ranks. Collective."""
        return request if self._votes is None else decode(self._votes.begin(encode(request))())

    def at(self, step: int, request: StopRequest | None, step_seconds: Callable[[], float]) -> StopRequest | None:
        """At a step boundary, return the result of the vote in progress, and begin another if it is due. Collective.

        Args:
            step: number of boundaries so far; the same on all ranks, and never decreases.
            request: the request of this rank.
            step_seconds: returns the duration of a step; called if a vote begins.
        """
        if self._votes is None:
            return request
        if self._pending is not None:
            agreed = self.finish()
            if agreed is not None:
                return agreed
        if step >= self._next:
            self._paced = True
            seconds = step_seconds()
            wait = max(1, int(SECONDS_BETWEEN / seconds)) if seconds > 0 else 1
            self._pending = self._votes.begin([*encode(request), wait])
            self._asked_at = step
        return None

    def change_pace(self) -> None:
        """Steps will have another duration: vote at the next one. All ranks must call this at the same boundary."""
        self._next, self._paced = 0, False

    def finish(self) -> StopRequest | None:
        """Wait for the vote in progress, if there is one, and return its result."""
        if self._pending is None:
            return None
        result, self._pending = self._pending, None
        *request, wait = result()
        self._next = self._asked_at + (wait if self._paced else 0)
        return decode(request)

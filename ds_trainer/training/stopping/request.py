"""``StopRequest``: who wants the training to stop, and what is to happen after. Plain data that ranks can vote on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_trainer.utils.exit_codes import REQUEUE, STOPPED

_CODES = (0, REQUEUE, STOPPED)  # in the order of their weight: what a person asks for counts more
_REASONS = ("SIGTERM", "SIGUSR1", "SIGINT", "stop file", "job's stop file", "time limit")
_PLACES = 64  # reasons to a rank in one number


@dataclass(frozen=True)
class StopRequest:
    """A wish to stop.

    Attributes:
        code: the exit code that the processes are to end with.
        reason: one of a fixed list: a signal's name, ``"stop file"``, ``"time limit"`` ...
        rank: who has it.
        hurry: no checkpoint is to be begun any more.
    """

    code: int
    reason: str
    rank: int
    hurry: bool = False

    @property
    def text(self) -> str:
        """For a sentence: ``SIGUSR1 on rank 3``."""
        return f"{self.reason} on rank {self.rank}" if self.reason.startswith("SIG") else f"the {self.reason}"


def encode(request: StopRequest | None) -> list[int]:
    """Three numbers whose maximum over ranks is a request of one of them; zeros for none."""
    if request is None:
        return [0, 0, 0]
    asker = (request.rank + 1) * _PLACES + _REASONS.index(request.reason)
    return [_CODES.index(request.code), asker, int(request.hurry)]


def decode(votes: Sequence[int]) -> StopRequest | None:
    """The request that came of the votes of all ranks."""
    code, asker, hurry = votes
    if code == 0:
        return None
    rank, reason = divmod(asker, _PLACES)
    return StopRequest(_CODES[code], _REASONS[reason], rank - 1, bool(hurry))

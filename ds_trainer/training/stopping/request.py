"""``StopRequest``: why the training is to stop, and with which exit code. Plain data that ranks can vote on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_trainer.utils.exit_codes import REQUEUE, STOPPED

_CODES = (0, REQUEUE, STOPPED)  # in increasing priority: the request of a person wins
_REASONS = ("SIGTERM", "SIGUSR1", "SIGINT", "stop file", "job's stop file", "time limit")
_PLACES = 64  # the base in which rank and reason are packed into one number


@dataclass(frozen=True)
class StopRequest:
    """A request to stop.

    Attributes:
        code: the exit code with which the processes are to end.
        reason: one of a fixed list: the name of a signal, ``"stop file"``, ``"time limit"`` ...
        rank: the rank that received the request.
        hurry: whether to stop without a new checkpoint.
    """

    code: int
    reason: str
    rank: int
    hurry: bool = False

    @property
    def text(self) -> str:
        """The reason for use in a message: ``SIGUSR1 on rank 3``."""
        return f"{self.reason} on rank {self.rank}" if self.reason.startswith("SIG") else f"the {self.reason}"


def encode(request: StopRequest | None) -> list[int]:
    """Encode a request as three numbers; zeros for none. Their maximum over ranks is the request of one of them."""
    if request is None:
        return [0, 0, 0]
    origin = (request.rank + 1) * _PLACES + _REASONS.index(request.reason)
    return [_CODES.index(request.code), origin, int(request.hurry)]


def decode(votes: Sequence[int]) -> StopRequest | None:
    """Decode the maximum over the votes of all ranks."""
    code, origin, hurry = votes
    if code == 0:
        return None
    rank, reason = divmod(origin, _PLACES)
    return StopRequest(_CODES[code], _REASONS[reason], rank - 1, bool(hurry))

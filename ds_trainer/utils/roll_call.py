"""Which rank is gone, if connections broke and no rank has reported an error.

A process that is killed reports nothing. All that others see is a broken connection, whose error names an address or
nobody, and the first of them to end would look like the culprit. So the first rank with such an error calls the roll in
the rendezvous store, at the place where failures are reported: a thread of every living process answers within two of
its polls, whatever its training thread waits for. Those that do not answer are named to all.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from ds_trainer.utils.errors import listed
from ds_trainer.utils.exit_codes import FAULT
from ds_trainer.utils.host_memory import kernel_kills, killed_for_memory
from ds_trainer.utils.outcomes import Blame, host_name, record_blame
from ds_trainer.utils.store import RankStore, expiry, poll

_CALLS = "calls"


class Failure(NamedTuple):
    """What is known of the failure of another rank.

    Attributes:
        text: which rank, and what happened to it.
        exit_code: the code with which the ranks end.
        reported: whether it is an error that a rank has reported, so that the output of that rank has a traceback.
    """

    text: str
    exit_code: int
    reported: bool = True


class RollCall:
    """The roll of one process group. Every rank has one.

    Args:
        notes: the store.
        rank, world_size: this process's rank, and the number of ranks.
        seconds: within which a living rank answers.
    """

    def __init__(self, notes: RankStore, rank: int, world_size: int, seconds: float) -> None:
        self._notes, self._rank, self._world_size, self._seconds = notes, rank, world_size, seconds
        self._lock, self._answered, self._kernel_kills = threading.Lock(), "", kernel_kills()
        notes.set(f"host/{rank}", host_name())

    @staticmethod
    def is_call(first: dict[str, Any]) -> bool:
        """Whether ``first``, at the place of the first failure, calls the roll."""
        return _CALLS in first

    def call(self, place: str, error: str, exit_code: int) -> None:
        """Call the roll at ``place`` unless that is taken, wait for the answers, and tell all ranks the result.

        Args:
            place: the key of the first failure.
            error, exit_code: this rank's error and code, which count as the cause if all ranks answer.
        """
        if not self._notes.set_first(place, {"rank": self._rank, _CALLS: True}):
            return
        self._answer(place)
        answers: set[int] = set()

        def complete() -> bool:
            answers.update(self._notes.get_list(f"{place}/present"))
            return len(answers) == self._world_size

        if poll(complete, expiry(self._seconds), self._world_size):
            failure = Failure(f"rank {self._rank} failed with {error}", exit_code)
        else:
            ranks = sorted(set(range(self._world_size)) - answers)
            host = self._notes.get(f"host/{ranks[0]}") or "?"
            who = f"rank {ranks[0]} on {host} is" if len(ranks) == 1 else f"{len(ranks)} ranks ({listed(ranks, 8)}) are"
            text = f"{who} gone without an error: killed, crashed, ended early, or on a machine that failed"
            if host == host_name() and kernel_kills() > self._kernel_kills:
                text = f"{who} gone without an error: {killed_for_memory()}"
            record_blame(Blame(ranks[0], host, text))
            failure = Failure(text, FAULT, reported=False)
        self._notes.set(f"{place}/result", failure)

    def result(self, place: str, caller: int) -> Failure | None:
        """Answer, if this process has not yet done so, and wait for what the rank ``caller`` says of the roll.

        None if the cause is an error of this rank.
        """
        self._answer(place)
        try:
            failure = Failure(*self._notes.wait(f"{place}/result", expiry(2 * self._seconds)))
        except TimeoutError:
            return Failure(f"rank {caller} lost its connection to another rank, and then ended", FAULT, False)
        return None if failure.reported and caller == self._rank else failure

    def _answer(self, place: str) -> None:
        with self._lock:
            if self._answered != place:
                self._answered = place
                self._notes.append(f"{place}/present", self._rank)

"""Votes on stopping: what is said, when it is due, and that every vote is read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ds_trainer.training.stopping import stop_controller
from ds_trainer.training.stopping.stop_controller import StopRequest, StopVote, decode, encode
from ds_trainer.utils.exit_codes import REQUEUE, STOPPED

STOP_REQUESTS = [
    StopRequest(code, reason, rank, hurry)
    for code, reason in ((REQUEUE, "SIGTERM"), (STOPPED, "stop file"), (REQUEUE, "time limit"))
    for rank in (0, 3, 1023)
    for hurry in (False, True)
]


@pytest.mark.parametrize("stop_request", STOP_REQUESTS, ids=str)
def test_a_stop_request_survives_encoding(stop_request: StopRequest) -> None:
    assert decode(encode(stop_request)) == stop_request
    others = [max(pair) for pair in zip(encode(stop_request), encode(None), strict=True)]
    assert decode(others) == stop_request


def test_no_request_is_decoded_as_none() -> None:
    assert decode(encode(None)) is None


def test_a_stop_by_a_person_takes_precedence_over_a_signal() -> None:
    requests = [StopRequest(REQUEUE, "SIGTERM", 3), StopRequest(STOPPED, "stop file", 0, True)]
    decoded = decode([max(column) for column in zip(*map(encode, requests), strict=True)])
    assert decoded is not None and (decoded.code, decoded.hurry) == (STOPPED, True)


class Votes:
    """All ranks: this one, and others whose votes a test sets."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.read: list[int] = []
        self.others = [0, 0, 0, 0]

    def begin(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self.begun.append(list(values))
        turn, others = len(self.begun), self.others[: len(values)]

        def finish() -> list[int]:
            assert turn not in self.read
            self.read.append(turn)
            return [max(pair) for pair in zip(values, others, strict=True)]

        return finish


def run(ballot: StopVote, steps: range, seconds: float) -> list[int]:
    """The steps at which a vote was started or read; there may be no request."""
    found = []
    for step in steps:
        if ballot.is_due(step):
            found.append(step)
            assert ballot.at(step, None, lambda: seconds) is None
    return found


def test_votes_are_a_quarter_of_a_second_apart() -> None:
    votes = Votes()
    found = run(StopVote(votes), range(1, 31), stop_controller.SECONDS_BETWEEN / 10)
    assert found == [1, 2, 11, 12, 21, 22]
    assert votes.begun == [[0, 0, 0, 10]] * 3


def test_the_slowest_rank_sets_the_vote_interval() -> None:
    votes = Votes()
    votes.others = [0, 0, 0, 15]
    assert run(StopVote(votes), range(1, 20), stop_controller.SECONDS_BETWEEN / 10) == [1, 2, 16, 17]


@pytest.mark.parametrize("seconds", [0.0, 1.0, stop_controller.SECONDS_BETWEEN])
def test_long_steps_vote_every_time(seconds: float) -> None:
    assert run(StopVote(Votes()), range(1, 6), seconds) == [1, 2, 3, 4, 5]


def test_a_changed_step_time_is_voted_on_at_once() -> None:
    votes = Votes()
    ballot = StopVote(votes)
    assert run(ballot, range(1, 6), stop_controller.SECONDS_BETWEEN / 100) == [1, 2]
    ballot.change_pace()
    assert run(ballot, range(6, 9), stop_controller.SECONDS_BETWEEN) == [6, 7, 8]
    ballot = StopVote(Votes())
    ballot.at(1, None, lambda: stop_controller.SECONDS_BETWEEN / 100)
    ballot.change_pace()  # while a vote is under way that has the old pace
    assert ballot.finish() is None
    assert ballot.is_due(2)


def test_a_request_of_another_rank_is_received_one_step_later() -> None:
    votes, request = Votes(), StopRequest(REQUEUE, "SIGUSR1", 5)
    ballot = StopVote(votes)
    assert ballot.at(1, None, lambda: 1.0) is None
    votes.others = [*encode(request), 0]
    assert ballot.at(2, None, lambda: 1.0) is None
    assert ballot.at(3, None, lambda: 1.0) == request
    assert len(votes.begun) == 2  # and no vote is begun any more
    assert ballot.finish() is None


def test_one_process_follows_its_own_request() -> None:
    request = StopRequest(STOPPED, "stop file", 0)
    ballot = StopVote(None)
    assert ballot.at(1, request, lambda: 1.0) == ballot.now(request) == request
    assert ballot.now(None) is None and ballot.finish() is None
    assert StopVote(Votes()).now(request) == request

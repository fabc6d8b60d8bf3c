"""``StopController``: all ranks agree between steps whether the training stops early."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ds_trainer.checkpoint.protocol.checkpoint_directory import HOW_TO_RESUME
from ds_trainer.training.stopping.job_end import JobEnd
from ds_trainer.training.stopping.signals import SignalCounter
from ds_trainer.utils import distributed
from ds_trainer.utils.exit_codes import REQUEUE, STOPPED
from ds_trainer.utils.host_votes import HostVotes
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import whole_number

logger = get_logger(__name__)

STOP_FILE = "STOP"
JOB_STOP_FILE = "DS_TRAINER_STOP_FILE"
UNKNOWN_SAVE_SECONDS = 30.0
"""Assumed duration of a save before the first checkpoint."""
_STEPS_AHEAD = 3  # steps between a request and the stop: the vote is read a step later
_SAVE_MARGIN = 1.5  # the next save may take longer than the longest so far
_STEP_HISTORY = 16  # step durations that are kept
SECONDS_BETWEEN = 0.25
"""Seconds between two votes."""


# ``StopRequest``: why the training is to stop, and with which exit code. Plain data that ranks can vote on.


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


def launcher_restarts(environment: Mapping[str, str]) -> bool:
    """Whether the launcher treats every exit code but 0 as a crash, and restarts the ranks (torchrun)."""
    names = ("RESTART_COUNT", "MAX_RESTARTS")
    restarts, limit = (whole_number(environment.get(f"TORCHELASTIC_{name}", "")) for name in names)
    return restarts is not None and limit is not None and restarts < limit


class TrainingStopped(SystemExit):
    """The training was stopped between two steps. If nobody catches this, the process ends with its exit code.

    Attributes:
        code: 75 if the job is to be restarted, 77 if not (:mod:`ds_trainer.utils.exit_codes`). In place of 77 it is 0
            with a launcher that restarts the ranks at any other code (``torchrun --max-restarts``).
        step: optimizer steps done.
        checkpoint: the checkpoint from which the run can resume; None if there is none.
        reason: what requested the stop.
        resume: how to resume; empty if that is not possible.
    """

    def __init__(self, code: int, step: int, checkpoint: Path | None, reason: str, resume: str = "") -> None:
        super().__init__(code)
        self.step = step
        self.checkpoint = checkpoint
        self.reason = reason
        self.resume = resume

    def __str__(self) -> str:
        checkpoint = f"{self.checkpoint} is complete" if self.checkpoint is not None else "there is no checkpoint"
        advice = "restart the job" if self.code == REQUEUE else "no restart requested"
        resume = f" To resume, {self.resume}." if self.resume else ""
        return f"Stopped at step {self.step} by {self.reason}: {checkpoint}. Exit code {self.code}: {advice}.{resume}"


class EvaluationAborted(BaseException):
    """All ranks have agreed to stop during an evaluation of the training; the resumed run repeats the evaluation.

    Like KeyboardInterrupt, it is no ``Exception``: code that handles failures and continues does not catch it.
    """


class StopController:
    """Context manager that watches for requests to stop.

    Args:
        output_dir: a file ``STOP`` in it stops the run.
        saves: whether a stop writes a checkpoint. If not, signals keep their usual effect, time limits are ignored,
            and stop files just end the run.
        resumable: whether the run can resume from its checkpoints; if not, the exit code asks for no restart.
        margin: seconds before the end of the job by which the last checkpoint must be complete.
        votes: how all ranks vote; None for one process.
        automatic: whether the same command, started again, resumes from the newest checkpoint (``auto_resume``).

    Attributes:
        saves: see above.
        agreed: the request that all ranks have agreed on; None while the training continues.
        save_seconds: duration of the longest save of this run; None before the first.
        before_exit: called before a signal ends the process without a checkpoint; finishes the save in progress.
    """

    def __init__(
        self,
        output_dir: Path,
        saves: bool,
        resumable: bool,
        margin: float,
        votes: HostVotes | None,
        automatic: bool = False,
    ) -> None:
        self.saves = saves
        self._automatic = automatic
        self._resumable = saves and resumable
        self.agreed: StopRequest | None = None
        self.before_exit: Callable[[], None] = lambda: None
        self.save_seconds: float | None = None
        self._margin = margin
        self._signals = SignalCounter()
        self._vote = StopVote(votes)
        self._rank = distributed.rank()
        self._files = {"stop file": (output_dir / STOP_FILE, STOPPED)} if self._rank == 0 else {}
        if self._rank == 0 and (named := os.environ.get(JOB_STOP_FILE)):
            self._files["job's stop file"] = Path(named), REQUEUE
        self._end = JobEnd() if self._rank == 0 and saves else None
        self._durations: deque[float] = deque(maxlen=_STEP_HISTORY)
        self._last = time.perf_counter()
        self._next_look = 0.0
        self._boundary = 0

    def __enter__(self) -> StopController:
        if self.saves:
            self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, traceback)
        if self._end is not None:
            self._end.close()

    @property
    def signaled(self) -> bool:
        """Whether this process has received a signal to stop."""
        return self._signals.requests > 0

    def before_first_step(self) -> bool:
        """Whether to stop before the first step. Collective."""
        self.agreed = self._vote.now(self._own_request())
        self._last = time.perf_counter()
        return self.agreed is not None

    def after_step(self) -> bool:
        """Whether to stop after this step. Collective, but no rank waits."""
        self._boundary += 1  # not the step of the run, which a rollback decreases
        now = time.perf_counter()
        self._durations.append(now - self._last)
        self._last = now
        if self._vote.is_due(self._boundary):
            self.agreed = self._vote.at(self._boundary, self._own_request(), lambda: statistics.median(self._durations))
        return self.agreed is not None

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context of an evaluation during the training. Call :meth:`after_step` after each of its micro-batches.

        The durations of evaluation steps and of training steps are kept apart.
        """
        of_training, self._durations = self._durations, deque(maxlen=_STEP_HISTORY)
        self._restart_timing()
        try:
            yield
        finally:
            self._durations = of_training
            self._restart_timing()

    def _restart_timing(self) -> None:
        self._vote.change_pace()
        self._last = time.perf_counter()

    def no_more_steps(self) -> None:
        """Finish the vote in progress at the end of the training. Collective."""
        self._vote.finish()

    def note_save(self, seconds: float) -> None:
        """Record the duration of a save."""
        self.save_seconds = max(seconds, self.save_seconds or 0.0)

    def stopped(self, step: int, checkpoint: Path | None) -> TrainingStopped:
        """The exception to raise once the stop is complete. Removes the file ``STOP`` that requested it."""
        assert self.agreed is not None
        if self.agreed.reason == "stop file" and self._rank == 0:
            try:
                self._files["stop file"][0].unlink(missing_ok=True)
            except OSError as error:  # a directory of that name, a disk that has become read-only
                logger.warning("%s. Remove it: until then every start of this run stops at once.", error)
        code = self.agreed.code if self._resumable else STOPPED
        if code == STOPPED and launcher_restarts(os.environ):
            code = 0
        resume = "start the same command again" if self._automatic else HOW_TO_RESUME
        possible = self._resumable and checkpoint is not None
        return TrainingStopped(code, step, checkpoint, self.agreed.text, resume if possible else "")

    def _own_request(self) -> StopRequest | None:
        """The request that this rank has received; a stop file has priority."""
        hurry = self._signals.requests > 1
        if self._last >= self._next_look:  # not at every step: the file system may be a slow shared one
            for reason, (path, code) in self._files.items():
                if path.exists():
                    # The time of the next look stays, because this boundary may only read a vote.
                    return StopRequest(code, reason, self._rank, hurry)
            self._next_look = self._last + SECONDS_BETWEEN
        if self._signals.requests:
            return StopRequest(REQUEUE, self._signals.name, self._rank, hurry)
        if self._end is not None and self._end.at is not None and time.time() + self._needed() >= self._end.at:
            return StopRequest(REQUEUE, "time limit", self._rank, hurry)
        return None

    def _needed(self) -> float:
        """Seconds from a request now to a complete checkpoint and the end of the process."""
        step = max(self._durations, default=0.0)
        save = UNKNOWN_SAVE_SECONDS if self.save_seconds is None else self.save_seconds
        return _STEPS_AHEAD * step + _SAVE_MARGIN * save + self._margin


# At a step boundary each rank puts its request into a vote that runs during the next step. The result is read at the
# boundary after that step. Votes use the host only (utils/host_votes.py). They are a fraction of a second apart. Ranks
# also vote on the step of the next vote, because their clocks differ and their step counts do not.


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

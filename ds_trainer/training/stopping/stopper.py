"""``Stopper``: what a training looks at between its steps to see whether it is to stop, and with what it then ends."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ds_trainer.training.stopping import vote
from ds_trainer.training.stopping.job_end import JobEnd
from ds_trainer.training.stopping.request import StopRequest
from ds_trainer.training.stopping.signals import SignalCounter
from ds_trainer.utils import distributed
from ds_trainer.utils.exit_codes import REQUEUE, STOPPED
from ds_trainer.utils.host_votes import HostVotes

STOP_FILE = "STOP"
JOB_STOP_FILE = "DS_TRAINER_STOP_FILE"
UNKNOWN_SAVE_SECONDS = 30.0
"""What a checkpoint is taken to need before one was written."""
_STEPS_AHEAD = 3  # until a wish of now is a stop: the vote is read a step later
_SLOWER = 1.5
_REMEMBERED = 16  # steps of which the duration is known


def starts_again(environment: Mapping[str, str]) -> bool:
    """Whether the launcher takes every exit code but 0 for a crash, and starts the ranks again (torchrun)."""
    started, most = (environment.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return started.isdigit() and most.isdigit() and int(started) < int(most)


class TrainingStopped(SystemExit):
    """A training was stopped between two steps; left alone, it ends the process with its exit code.

    Attributes:
        code: 75 where it is to be started again, 77 where not (:mod:`ds_trainer.utils.exit_codes`), which is 0 for a
            launcher that would start the ranks again at any other (``torchrun --max-restarts``).
        step: optimizer steps done.
        checkpoint: from which the run goes on; None where there is none.
        reason: who asked for it.
    """

    def __init__(self, code: int, step: int, checkpoint: Path | None, reason: str) -> None:
        super().__init__(code)
        self.step = step
        self.checkpoint = checkpoint
        self.reason = reason

    def __str__(self) -> str:
        kept = f"{self.checkpoint} is complete" if self.checkpoint is not None else "there is no checkpoint"
        advice = "start again to go on" if self.code == REQUEUE else "it was asked for"
        return f"Stopped at step {self.step} by {self.reason}: {kept}. Exit code {self.code}: {advice}."


class EvaluationGivenUp(BaseException):
    """All ranks have agreed to stop while the training evaluated: whoever goes on makes the evaluation anew. Like
    KeyboardInterrupt no failure, so that code which goes on after failures lets it pass."""


class Stopper:
    """Looks out for requests to stop while it is entered.

    Args:
        output_dir: where somebody may put a file ``STOP``.
        saves: whether a stop writes a checkpoint. Where not, signals do what they do without us, time limits do not
            matter, and stop files just end the run.
        resumable: whether the run can go on from its checkpoints; where not, nobody is told to start it again.
        margin: seconds before the end of the job by which the last checkpoint is to be complete.
        votes: how all ranks vote; None for one process.

    Attributes:
        saves: see above.
        agreed: what all ranks have agreed on; None while the training goes on.
        save_seconds: what the longest checkpoint of this run took; None before the first.
    """

    def __init__(self, output_dir: Path, saves: bool, resumable: bool, margin: float, votes: HostVotes | None) -> None:
        self.saves = saves
        self._resumable = saves and resumable
        self.agreed: StopRequest | None = None
        self.save_seconds: float | None = None
        self._margin = margin
        self._signals = SignalCounter()
        self._vote = vote.StopVote(votes)
        self._rank = distributed.rank()
        self._files = {"stop file": (output_dir / STOP_FILE, STOPPED)} if self._rank == 0 else {}
        if self._rank == 0 and (named := os.environ.get(JOB_STOP_FILE)):
            self._files["job's stop file"] = Path(named), REQUEUE
        self._end = JobEnd() if self._rank == 0 and saves else None
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._last = time.perf_counter()
        self._look_at = 0.0
        self._boundary = 0

    def __enter__(self) -> Stopper:
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
    def signalled(self) -> bool:
        """Whether this process has been asked by a signal."""
        return self._signals.requests > 0

    def before_first_step(self) -> bool:
        """Whether to stop before anything is done. Collective."""
        self.agreed = self._vote.now(self._wish())
        self._last = time.perf_counter()
        return self.agreed is not None

    def after_step(self) -> bool:
        """Whether to stop after this step. Collective, but nobody waits."""
        self._boundary += 1  # not the run's step, which a rollback takes back
        now = time.perf_counter()
        self._durations.append(now - self._last)
        self._last = now
        if self._vote.is_due(self._boundary):
            self.agreed = self._vote.at(self._boundary, self._wish(), statistics.median(self._durations))
        return self.agreed is not None

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A block in which an evaluation is made. Its rounds are steps here: :meth:`after_step` comes after each. They
        and the time that the evaluation takes say nothing of how long steps of the training are."""
        of_steps, self._durations = self._durations, deque(maxlen=_REMEMBERED)
        self._begin_others()
        try:
            yield
        finally:
            self._durations = of_steps
            self._begin_others()

    def _begin_others(self) -> None:
        self._vote.change_pace()
        self._last = time.perf_counter()

    def no_more_steps(self) -> None:
        """The training has come to its end. Collective."""
        self._vote.finish()

    def note_save(self, seconds: float) -> None:
        """A checkpoint has taken so long."""
        self.save_seconds = max(seconds, self.save_seconds or 0.0)

    def stopped(self, step: int, checkpoint: Path | None) -> TrainingStopped:
        """The exception to raise, once all is done; takes ``STOP`` away, which has been obeyed."""
        assert self.agreed is not None
        if self.agreed.reason == "stop file" and self._rank == 0:
            self._files["stop file"][0].unlink(missing_ok=True)
        code = self.agreed.code if self._resumable else STOPPED
        if code == STOPPED and starts_again(os.environ):
            code = 0
        return TrainingStopped(code, step, checkpoint, self.agreed.text)

    def _wish(self) -> StopRequest | None:
        """What this rank has seen; what a person asked for comes first."""
        hurry = self._signals.requests > 1
        if self._last >= self._look_at:  # a shared file system is not to be asked at every step
            for reason, (path, code) in self._files.items():
                if path.exists():
                    return StopRequest(code, reason, self._rank, hurry)  # again next time: this may be no vote
            self._look_at = self._last + vote.SECONDS_BETWEEN
        if self._signals.requests:
            return StopRequest(REQUEUE, self._signals.name, self._rank, hurry)
        if self._end is not None and self._end.at is not None and time.time() + self._needed() >= self._end.at:
            return StopRequest(REQUEUE, "time limit", self._rank, hurry)
        return None

    def _needed(self) -> float:
        """Seconds from a wish of now to a complete checkpoint and the end of the process."""
        step = max(self._durations, default=0.0)
        save = UNKNOWN_SAVE_SECONDS if self.save_seconds is None else self.save_seconds
        return _STEPS_AHEAD * step + _SLOWER * save + self._margin

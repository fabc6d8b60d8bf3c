"""``Conductor``: trials are proposed on rank 0 and run on all ranks; one that fails leaves the next one a clean start.

Rank 0 tells the others of each trial before it begins. A trial that raises on any rank has failed on all of them: its
engine is closed, and the ranks make a new process group, since in the old one a collective may be half done.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ds_trainer.engine.process_group import renew_process_group
from ds_trainer.training.search.trial import SearchEnds, SearchTrial, TrialPruned
from ds_trainer.utils import distributed
from ds_trainer.utils.failures import PeerFailure, fails_together, patience
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)
T = TypeVar("T")
Report = Callable[[Any, int, dict[str, Any]], bool]
"""``report(objective, step, metrics)`` after each evaluation, on rank 0: whether to give the trial up."""

_TRIAL, _DONE, _FAILED = "trial", "done", "failed"


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        objective: of its last evaluation; None where it failed.
        pruned: whether it was given up.
        error: why it failed, as this rank saw it.
    """

    objective: Any = None
    pruned: bool = False
    error: Exception | None = None


class Conductor:
    """Runs the trials of one search.

    Args:
        trainer: what is trained.
        directions: how many objectives there are; None for a single number.
    """

    def __init__(self, trainer: Trainer, directions: int | None = None) -> None:
        self.trainer = trainer
        self.directions = directions
        self.ends_with: Exception | None = None
        """What ends the search: a mistake that every trial would repeat, or ranks that did not come together again."""
        self._lost = False
        self._last_error: Exception | None = None

    def lead(self, act: Callable[[], T]) -> T:
        """``act()`` on rank 0, which calls :meth:`run`; the others take part in its trials. All get its result.

        Raises:
            Exception: whatever ``act`` raised; on the other ranks a PeerFailure, or their own error of that trial.
        """
        self.trainer._join_ranks()
        with patience():
            if distributed.rank() != 0:
                return self._follow()
            try:
                result = act()
                if self.ends_with is not None:
                    raise self.ends_with
            except Exception as error:
                if not self._lost:
                    distributed.broadcast_object((_FAILED, f"{type(error).__name__}: {error}"))
                raise
            distributed.broadcast_object((_DONE, result))
            return result

    def run(self, trial: SearchTrial, report: Report | None = None) -> Outcome:
        """Run ``trial`` on all ranks; on rank 0 only, within :meth:`lead`."""
        distributed.broadcast_object((_TRIAL, trial))
        return self._take_part(trial, report)

    def _follow(self) -> Any:
        while True:
            what, content = _next_message()
            if what == _DONE:
                return content
            if what == _FAILED:
                own, self._last_error = self._last_error, None
                if own is not None and content.startswith(f"{type(own).__name__}: "):
                    raise own
                raise PeerFailure(f"rank 0 ended the search with {content}")
            self._take_part(content, None)
            if self._lost:
                assert self.ends_with is not None
                raise self.ends_with

    def _take_part(self, trial: SearchTrial, report: Report | None) -> Outcome:
        try:
            outcome = _train(self.trainer, trial, report, self.directions)
            error: Exception | None = None
        except Exception as raised:
            error = raised
            if not isinstance(error, PeerFailure):
                logger.error("trial %s failed on rank %d", trial.id, self.trainer.args.process_index, exc_info=error)
            outcome = Outcome(error=error)
        self._last_error = error
        if error is not None:
            _let_go(error)
        self.trainer._end_trial(failed=error is not None)
        if isinstance(error, SearchEnds):
            self.ends_with = error
        if error is not None and distributed_job(self.trainer):
            self._renew()
        return outcome

    def _renew(self) -> None:
        args = self.trainer.args
        try:
            renew_process_group(args.device_type, args.ddp_timeout_delta)
        except Exception as error:
            self._lost, self.ends_with = True, error


def distributed_job(trainer: Trainer) -> bool:
    """Whether there are several ranks, also where the process group has just been lost."""
    return trainer.args.world_size > 1


@fails_together
def _next_message() -> tuple[str, Any]:
    message: tuple[str, Any] = distributed.broadcast_object(None)
    return message


@fails_together
def _train(trainer: Trainer, trial: SearchTrial, report: Report | None, directions: int | None) -> Outcome:
    """Train and, where training has not evaluated, evaluate. Returns rank 0's objective on all ranks."""
    trainer._listen_to_trial(report, directions)
    pruned = False
    try:
        trainer.train(trial=trial)
        if trainer.objective is None:
            trainer.objective = trainer._objective_of(trainer.evaluate())
    except TrialPruned:
        pruned = True
    return Outcome(distributed.broadcast_object(trainer.objective), pruned)


def _let_go(error: BaseException) -> None:
    """Drop the variables of the frames in which the errors arose: they hold the engine and the process group."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        todo += [current.__cause__, current.__context__]
    gc.collect()

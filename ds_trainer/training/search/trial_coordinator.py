"""``TrialCoordinator``: rank 0 proposes trials, all ranks run them, and a failed trial does not affect the next one.

Rank 0 broadcasts each trial before it begins. A trial that raises an exception on one rank has failed on all ranks.
Then its engine is closed, and the ranks create a new process group, because a collective of the old one may be
incomplete.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ds_trainer.engine.process_group import renew_process_group
from ds_trainer.training.search.trial import SearchError, SearchTrial, TrialPruned
from ds_trainer.training.search.trial_runner import Report
from ds_trainer.training.startup.process_setup import join_ranks
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import text_of
from ds_trainer.utils.failures import PeerFailure, fails_together, survive_failures
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)
T = TypeVar("T")
_TRIAL, _DONE, _FAILED = "trial", "done", "failed"


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended.

    Attributes:
        objective: the objective of its last evaluation; None if it failed.
        pruned: whether the search pruned it.
        error: the exception on this rank, if it failed.
    """

    objective: Any = None
    pruned: bool = False
    error: Exception | None = None


class TrialCoordinator:
    """Runs the trials of one search.

    Args:
        trainer: the Trainer.
        directions: number of objectives; None for a single number.
    """

    def __init__(self, trainer: Trainer, directions: int | None = None) -> None:
        self.trainer = trainer
        self.directions = directions
        self.fatal_error: Exception | None = None
        """An error that ends the search: every trial would repeat it, or the process group could not be recreated."""
        self._group_lost = False
        self._last_error: Exception | None = None

    def lead(self, search: Callable[[], T]) -> T:
        """Call ``search()`` on rank 0, which calls :meth:`run`; the other ranks take part in its trials. Collective.

        Returns:
            The result of ``search``, on all ranks.

        Raises:
            Exception: the exception of ``search``; on other ranks a PeerFailure, or their own exception in that trial.
        """
        join_ranks(self.trainer.args)
        with survive_failures():
            if distributed.rank() != 0:
                return self._follow()
            try:
                result = search()
                if self.fatal_error is not None:
                    raise self.fatal_error
            except Exception as error:
                if not self._group_lost:
                    distributed.broadcast_object((_FAILED, f"{type(error).__name__}: {text_of(error)}"))
                raise
            distributed.broadcast_object((_DONE, result))
            return result

    def run(self, trial: SearchTrial, report: Report | None = None) -> TrialOutcome:
        """Run ``trial`` on all ranks. Call it on rank 0, within :meth:`lead`."""
        distributed.broadcast_object((_TRIAL, trial))
        return self._take_part(trial, report)

    def _follow(self) -> Any:
        while True:
            kind, content = _next_message()
            if kind == _DONE:
                return content
            if kind == _FAILED:
                own, self._last_error = self._last_error, None
                if own is not None and content.startswith(f"{type(own).__name__}: "):
                    raise own
                raise PeerFailure(f"rank 0 ended the search with {content}")
            self._take_part(content, None)
            if self._group_lost:
                assert self.fatal_error is not None
                raise self.fatal_error

    def _take_part(self, trial: SearchTrial, report: Report | None) -> TrialOutcome:
        try:
            outcome = _train(self.trainer, trial, report, self.directions)
            error: Exception | None = None
        except Exception as raised:
            error = raised
            if not isinstance(error, PeerFailure):
                logger.error("trial %s failed on rank %d", trial.id, self.trainer.args.process_index, exc_info=error)
            outcome = TrialOutcome(error=error)
        self._last_error = error
        if error is not None:
            # Clear the local variables of the frames of an exception: they keep the engine and the process group alive.
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
        self.trainer._ds_trainer.trials.end_trial(failed=error is not None)
        if isinstance(error, SearchError):
            self.fatal_error = error
        if error is not None and self.trainer.args.world_size > 1:
            self._renew()
        return outcome

    def _renew(self) -> None:
        args = self.trainer.args
        try:
            renew_process_group(args.device_type, args.ddp_timeout_delta)
        except Exception as error:
            self._group_lost, self.fatal_error = True, error


@fails_together
def _next_message() -> tuple[str, Any]:
    message: tuple[str, Any] = distributed.broadcast_object(None)
    return message


@fails_together
def _train(trainer: Trainer, trial: SearchTrial, report: Report | None, directions: int | None) -> TrialOutcome:
    """Train, and evaluate if training has not done so. Returns the objective of rank 0 on all ranks."""
    trials = trainer._ds_trainer.trials
    trials.begin_trial(report, directions)
    pruned = False
    try:
        trainer.train(trial=trial)
        if trials.objective is None:
            trials.record_objective(trainer.evaluate())
    except TrialPruned:
        pruned = True
    return TrialOutcome(distributed.broadcast_object(trials.objective), pruned)

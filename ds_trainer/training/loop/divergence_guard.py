"""``DivergenceGuard``: skips or rolls back optimizer steps whose loss or gradient diverges.

The engine skips an update with a non-finite gradient on all ranks, at no extra cost
(:mod:`ds_trainer.engine.finite_step`). Only then do the ranks exchange their losses and apply the policy. With
``loss_spike_factor``, the mean loss of every step is summed over the ranks and read before the update: one small
all-reduce, and a wait for the device.

The incidents are part of the run: every checkpoint has them (``run.json``), and a rollback keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.arguments.enums import DivergencePolicy
from ds_trainer.callbacks.events import TrainingEvents
from ds_trainer.data.sharded_batch import plain_batches
from ds_trainer.monitor.health.divergence import SkippedSteps, SpikeDetector, TrainingDiverged
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import listed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine

logger = get_logger(__name__)

FOLDER = "divergence"
"""Folder in the output directory with the micro-batches of skipped steps."""
_SAVED_STEPS = 10  # in one training
_NAMED_SAMPLES = 16  # in one message
_MOST_FILES = 16  # of one incident: that of a rank more says nothing new


class Update(Enum):
    """Outcome of an optimizer step."""

    APPLIED = "applied"
    SKIPPED = "skipped"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class RolledBack:
    """Target of a rollback.

    Attributes:
        path: the checkpoint.
        tried: steps that had been attempted when it was written.
    """

    path: Path
    tried: int


class DivergenceGuard:
    """Applies the divergence policies to the optimizer steps of one training.

    Args:
        events: arguments (with the policies) and state.
        engine: updates the weights.
        global_batch_size: samples of a step.
        samples_ahead: positions in the dataset of the next micro-batches of this replica; None if unknown.
        roll_back: ``roll_back(reason)`` restores the newest checkpoint of this training; collective.
        log: logs values (``Trainer.log``).
        restored: the result of :meth:`to_json` in an earlier part of the run.

    Attributes:
        incidents: the incidents so far.
    """

    def __init__(
        self,
        events: TrainingEvents,
        engine: TrainingEngine,
        global_batch_size: int,
        samples_ahead: Callable[[int], list[list[int]] | None],
        roll_back: Callable[[str], RolledBack],
        log: Callable[[dict[str, Any]], None],
        restored: Mapping[str, Any] | None = None,
    ) -> None:
        args = events.args
        self._events = events
        self._engine = engine
        self._global_batch_size = global_batch_size
        self._samples_ahead = samples_ahead
        self._roll_back = roll_back
        self._log = log
        self._policies = (DivergencePolicy(args.nonfinite_policy), DivergencePolicy(args.loss_spike_policy))
        self.incidents = SkippedSteps(args.divergence_limit, args.divergence_window)
        self._spikes: SpikeDetector | None = None
        if args.loss_spike_factor is not None:
            self._spikes = SpikeDetector(args.loss_spike_factor, args.loss_spike_window)
        if restored:
            self.incidents.restore(restored["incidents"])
            if self._spikes is not None:
                self._spikes.restore(restored["losses"])
        self._saved = 0
        self._random: torch.Tensor | None = None
        self._loss: float | None = None
        self._is_spike = False

    def to_json(self) -> dict[str, Any]:
        """The incidents and the loss history as plain data."""
        losses = [] if self._spikes is None else self._spikes.to_json()
        return {"incidents": self.incidents.to_json(), "losses": losses}

    @property
    def skipped_data(self) -> bool:
        """Whether a rollback has skipped data, so that the data ends before the planned number of steps."""
        return self.incidents.rollbacks > 0

    # -- one step -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before the first forward pass of a step, keep the random state for a replay."""
        self._random = torch.get_rng_state()

    def before_update(self, contributions: Sequence[torch.Tensor]) -> bool:
        """Whether to skip the update because the loss is a spike. The same on all ranks.

        Args:
            contributions: the contribution of each micro-batch of this rank to the loss: scalars on the device.
        """
        self.incidents.tried += 1
        if self._spikes is None:
            return False
        # Mean loss of the step over all ranks, the same number on all of them. Collective; waits for the device.
        loss = torch.stack(list(contributions)).sum().double()
        distributed.all_reduce_sum(loss)
        self._loss = float(loss) / self._engine.layout.tp
        self._is_spike = self._spikes.is_spike(self._loss)
        return self._is_spike

    def after_update(self, applied: bool, batches: Sequence[Any], contributions: Sequence[torch.Tensor]) -> Update:
        """The outcome of the step; applies the policy if the update was skipped. The same on all ranks.

        Args:
            applied: whether the engine updated the weights.
            batches: this rank's micro-batches of the step.
            contributions: see :meth:`before_update`.

        Raises:
            TrainingDiverged: the policy is ``stop``, there were too many incidents, or there is no checkpoint for a
                rollback.
        """
        if applied:
            if self._spikes is not None and self._loss is not None:
                self._spikes.add(self._loss)
            return Update.APPLIED
        losses = torch.stack(list(contributions)).tolist()
        if not self._is_spike and self._engine.scales_loss and not self._any_loss_nonfinite(losses):
            return Update.SKIPPED  # the loss scale was too large, which is normal in fp16
        reports = distributed.gather_objects((losses, self._samples_ahead(len(batches))))
        batches = plain_batches(batches, lambda: parallel_groups(self._engine.layout))
        spike = ""
        if self._is_spike:
            spike = f"the loss is {self._loss:g}, and the median of earlier steps is {self._median:g}"
        return self._incident(spike, reports, batches, losses)

    @property
    def _median(self) -> float:
        return math.nan if self._spikes is None else self._spikes.median

    @staticmethod
    def _any_loss_nonfinite(losses: list[float]) -> bool:
        """Whether a loss is not finite on some rank. Collective."""
        return bool(distributed.agree(torch.tensor([int(not all(map(math.isfinite, losses)))]))[0])

    # -- an incident --------------------------------------------------------------------------------------------------

    def _incident(self, spike: str, reports: list[Any], batches: Sequence[Any], losses: list[float]) -> Update:
        args, state, incidents = self._events.args, self._events.state, self.incidents
        step, policy = state.global_step + 1, self._policies[bool(spike)]
        name = "loss_spike_policy" if spike else "nonfinite_policy"
        affected = [rank for rank, (found, _) in enumerate(reports) if not all(map(math.isfinite, found))]
        count = incidents.record()
        message = [f"Step {step}: {spike or _nonfinite(affected, reports)}; {_sample_numbers(affected, reports)}."]
        suspects = affected or range(len(reports))
        kept = suspects[:: -(-len(suspects) // _MOST_FILES)]
        path = self._save(step, distributed.rank() in kept, batches, losses, reports)
        if path is not None:
            whose = "Its" if len(kept) == len(suspects) else f"{len(kept)} of these ranks'"
            message.append(f"{whose} micro-batches are in {path}; ds_trainer.monitor.health.replay runs them again.")
        if policy == DivergencePolicy.STOP:
            message.append(f"Training stops ({name}=stop); the weights are those before this step.")
            raise TrainingDiverged(" ".join(message))
        if incidents.limit_exceeded:
            message.append(
                f"This is incident {count} in {incidents.window} steps (divergence_limit={incidents.limit}): training "
                "stops; the weights are those before this step. Check the data, lower the learning rate, or raise "
                f"divergence_limit ({args.where('divergence_limit')})."
            )
            raise TrainingDiverged(" ".join(message))
        counted = f"incident {count} of at most {incidents.limit} in {incidents.window} steps"
        if policy == DivergencePolicy.SKIP:
            incidents.skipped += 1
            logger.warning("%s", f"{' '.join(message)} Its update is skipped ({name}=skip; {counted}).")
            return Update.SKIPPED
        incidents.rollbacks += 1
        target = self._roll_back(" ".join(message))
        skipped = incidents.tried - target.tried
        logger.warning(
            "%s",
            f"{' '.join(message)} Rolled back to {target.path} ({name}=rollback; {counted}). The run skips the data of "
            f"{skipped} steps, up to and including this step (at most {skipped * self._global_batch_size} samples).",
        )
        self._log({"rolled_back_from_step": step, "rolled_back_to_step": self._events.state.global_step})
        return Update.ROLLED_BACK

    def _save(
        self, step: int, wanted: bool, batches: Sequence[Any], losses: list[float], reports: list[Any]
    ) -> Path | None:
        """Save the micro-batches of this rank if ``wanted``. A disk error does not end the training. Collective.

        Returns:
            Their folder; None if there are enough, or if some rank could not write its own.
        """
        from ds_trainer.monitor.health.replay import save_batches

        if self._saved >= _SAVED_STEPS:
            return None
        self._saved += 1
        args, layout, rank = self._events.args, self._engine.layout, distributed.rank()
        again = f"-after-rollback-{self.incidents.rollbacks}" if self.incidents.rollbacks else ""
        folder = Path(args.output_dir or ".") / FOLDER / f"step-{step}{again}"
        facts = {
            "step": step,
            "rank": rank,
            "world_size": distributed.world_size(),
            "layout": layout.describe(),
            "seed": args.seed,
            "losses": losses,
            "samples": reports[rank][1],
            "random": self._random,
        }
        failed = False
        try:
            if wanted:
                save_batches(folder / f"rank_{rank}.pt", facts, list(batches))
        except OSError as error:
            failed = True
            logger.error("The micro-batches of step %d cannot be saved in %s: %s", step, folder, error)
        return None if distributed.agree(torch.tensor([int(failed)]), patient=True)[0] else folder


def _nonfinite(affected: list[int], reports: list[Any]) -> str:
    if not affected:
        return "the gradient is not finite, although the loss is finite on all ranks"
    losses = ", ".join(f"{x:g}" for x in reports[affected[0]][0])
    ranks = f"rank{'s' if len(affected) > 1 else ''} {listed(affected)}"
    return f"the loss is not finite on {ranks} (contributions of the micro-batches of rank {affected[0]}: {losses})"


def _sample_numbers(affected: list[int], reports: list[Any]) -> str:
    """The samples of the affected ranks, or of all ranks if there are none."""
    ranks = affected or range(len(reports))
    found = [reports[rank][1] for rank in ranks]
    if any(samples is None for samples in found):
        return "the positions of its samples are unknown"
    numbers = list(dict.fromkeys(number for samples in found for batch in samples for number in batch))
    return f"samples {listed(numbers, _NAMED_SAMPLES)} of the dataset"

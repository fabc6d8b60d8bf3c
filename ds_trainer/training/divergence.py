"""``DivergenceGuard``: the optimizer step, and what becomes of it where loss or gradient diverge.

The engine leaves an update out whose gradient is not finite, on all ranks alike, and costs nothing for it
(:mod:`ds_trainer.engine.finite_step`). Only then ranks tell each other what they saw, and the policy is applied. With
``loss_spike_factor`` the mean loss of every step is summed over the ranks and read before the update: one small
all-reduce, and a wait for the device.

What has happened belongs to the run, so it is in every checkpoint (``run.json``), and a rollback does not forget it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.arguments.enums import DivergencePolicy
from ds_trainer.monitor.health.finite import Incidents, SpikeDetector, TrainingDiverged
from ds_trainer.monitor.health.replay import save_batches
from ds_trainer.training.rollback import go_back
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)

FOLDER = "divergence"
"""Of the output directory: micro-batches of steps that were left out."""
_SAVED_STEPS = 10  # in one training
_NAMED_SAMPLES = 16  # in one message


class Update(Enum):
    """What became of an optimizer step."""

    APPLIED = "applied"
    LEFT_OUT = "left out"
    ROLLED_BACK = "rolled back"


class DivergenceGuard:
    """Makes the optimizer steps of one training.

    Args:
        trainer: whose engine steps, and whose arguments say what to do.
        kept: what :meth:`to_json` gave in an earlier part of the run.

    Attributes:
        incidents: what has happened so far.
    """

    def __init__(self, trainer: Trainer, kept: Mapping[str, Any] | None = None) -> None:
        args = trainer.args
        self._trainer = trainer
        self._began = time.time()
        self._policies = (DivergencePolicy(args.nonfinite_policy), DivergencePolicy(args.loss_spike_policy))
        self.incidents = Incidents(args.divergence_limit, args.divergence_window)
        self._spikes: SpikeDetector | None = None
        if args.loss_spike_factor is not None:
            self._spikes = SpikeDetector(args.loss_spike_factor, args.loss_spike_window)
        if kept:
            self.incidents.restore(kept["incidents"])
            if self._spikes is not None:
                self._spikes.restore(kept["losses"])
        self._saved = 0
        self._random: torch.Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """What has happened, as plain data."""
        losses = [] if self._spikes is None else self._spikes.to_json()
        return {"incidents": self.incidents.to_json(), "losses": losses}

    @property
    def skipped_data(self) -> bool:
        """Whether a rollback has passed over steps, so that the data ends before the steps that were planned."""
        return self.incidents.rollbacks > 0

    # -- one step -----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before the first forward pass of a step: note what a replay needs besides the batches."""
        self._random = torch.get_rng_state()

    def update(self, batches: Sequence[Any], shares: Sequence[torch.Tensor]) -> Update:
        """Make the optimizer step, or leave it out. Alike on all ranks.

        Args:
            batches: this rank's micro-batches of the step.
            shares: of the loss, one for each: scalars on the device.

        Raises:
            TrainingDiverged: the policy is to stop, there were too many, or there is nothing to go back to.
        """
        engine = self._trainer.engine
        self.incidents.tried += 1
        loss = None if self._spikes is None else self._mean(shares)
        is_spike = loss is not None and self._spikes is not None and self._spikes.is_spike(loss)
        if engine.step(leave_out=is_spike):
            if loss is not None and self._spikes is not None:
                self._spikes.add(loss)
            return Update.APPLIED
        own = [float(share) for share in shares]
        losses = distributed.gather_objects(own)
        if not is_spike and engine.scales_loss and all(math.isfinite(x) for of_rank in losses for x in of_rank):
            return Update.LEFT_OUT  # the loss scale was too large, as it has to be now and then
        told = list(zip(losses, distributed.gather_objects(self._samples(len(batches))), strict=True))
        spike = f"the loss is {loss:g}, the median of the steps before {self._median:g}" if is_spike else ""
        return self._incident(spike, told, batches, own)

    @property
    def _median(self) -> float:
        return math.nan if self._spikes is None else self._spikes.median

    def _mean(self, shares: Sequence[torch.Tensor]) -> float:
        """Mean loss of the step over all ranks, the same number on all of them. Collective; waits for the device."""
        loss = torch.stack(list(shares)).sum().double()
        distributed.all_reduce_sum(loss)
        return float(loss) / self._trainer.layout.tp  # tensor-parallel ranks hold the same shares

    def _samples(self, rounds: int) -> list[list[int]] | None:
        return self._trainer.data_place.samples_ahead(rounds)

    # -- an incident --------------------------------------------------------------------------------------------------

    def _incident(self, spike: str, told: list[Any], batches: Sequence[Any], own: list[float]) -> Update:
        trainer, incidents = self._trainer, self.incidents
        step, policy = trainer.state.global_step + 1, self._policies[bool(spike)]
        name = "loss_spike_policy" if spike else "nonfinite_policy"
        guilty = [rank for rank, (losses, _) in enumerate(told) if not all(map(math.isfinite, losses))]
        count = incidents.note()
        said = [f"Step {step}: {spike or _not_finite(guilty, told)}; {_named(guilty, told)}."]
        path = self._save(step, not guilty or distributed.rank() in guilty, batches, own, told)
        if path is not None:
            said.append(f"Its micro-batches are in {path}; ds_trainer.monitor.health.replay runs them again.")
        if policy == DivergencePolicy.STOP:
            said.append(f"Training stops ({name}=stop); the weights are those before this step.")
            raise TrainingDiverged(" ".join(said))
        if incidents.too_many:
            said.append(
                f"This is number {count} in {incidents.window} steps (divergence_limit={incidents.limit}): training "
                "stops; the weights are those before this step. Look at the data, lower the learning rate, or raise "
                f"divergence_limit ({trainer.args.where('divergence_limit')})."
            )
            raise TrainingDiverged(" ".join(said))
        counted = f"{count} of at most {incidents.limit} in {incidents.window} steps"
        if policy == DivergencePolicy.SKIP:
            incidents.skipped += 1
            self._warn(f"{' '.join(said)} Its update is left out ({name}=skip; {counted}).")
            return Update.LEFT_OUT
        incidents.rollbacks += 1
        went = go_back(trainer, self._began, " ".join(said))
        passed_over = incidents.tried - went.tried
        self._warn(
            f"{' '.join(said)} Back to {went.path} ({name}=rollback; {counted}): the data of {passed_over} steps (up "
            f"to {passed_over * trainer.batch_plan.step_size} samples) is passed over, this step's among it."
        )
        trainer.log({"rolled_back_from_step": step, "rolled_back_to_step": trainer.state.global_step})
        return Update.ROLLED_BACK

    def _warn(self, text: str) -> None:
        if distributed.rank() == 0:
            logger.warning("%s", text)

    def _save(self, step: int, wanted: bool, batches: Sequence[Any], own: list[float], told: list[Any]) -> Path | None:
        """Keep this rank's micro-batches where they are wanted; a disk that refuses does not end the training."""
        if self._saved >= _SAVED_STEPS:
            return None
        self._saved += 1
        trainer, rank = self._trainer, distributed.rank()
        again = f"-after-rollback-{self.incidents.rollbacks}" if self.incidents.rollbacks else ""
        folder = Path(trainer.args.output_dir or ".") / FOLDER / f"step-{step}{again}"
        facts = {
            "step": step,
            "rank": rank,
            "world_size": distributed.world_size(),
            "layout": trainer.layout.describe(),
            "seed": trainer.args.seed,
            "losses": own,
            "samples": told[rank][1],
            "random": self._random,
        }
        try:
            if wanted:
                save_batches(folder / f"rank_{rank}.pt", facts, list(batches))
        except OSError as error:
            logger.error("The micro-batches of step %d cannot be kept in %s: %s", step, folder, error)
        return folder


def _not_finite(guilty: list[int], told: list[Any]) -> str:
    if not guilty:
        return "the gradient is not finite, although the loss is on every rank"
    losses = ", ".join(f"{x:g}" for x in told[guilty[0]][0])
    ranks = f"rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))}"
    return f"the loss is not finite on {ranks} (shares of the micro-batches of rank {guilty[0]}: {losses})"


def _named(guilty: list[int], told: list[Any]) -> str:
    """Which samples these were: of the guilty ranks, or of all where nobody stands out."""
    ranks = guilty or range(len(told))
    found = [told[rank][1] for rank in ranks]
    if any(samples is None for samples in found):
        return "the data has no positions to name"
    numbers = list(dict.fromkeys(number for samples in found for batch in samples for number in batch))
    more = f" and {len(numbers) - _NAMED_SAMPLES} more" if len(numbers) > _NAMED_SAMPLES else ""
    return f"samples {', '.join(map(str, numbers[:_NAMED_SAMPLES]))}{more} of the dataset"

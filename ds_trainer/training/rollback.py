"""Back to a checkpoint without ending the process: weights, optimizer, schedule, random and trainer's state.

The place in the data stays where it is. So what was read since that checkpoint is not read again: the steps that led to
the trouble are passed over together with the one that showed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.callbacks.state import TrainerState
from ds_trainer.checkpoint.manager import choose_checkpoint
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint
from ds_trainer.monitor.health.finite import TrainingDiverged
from ds_trainer.training.resume import Resumption
from ds_trainer.utils import distributed

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer


@dataclass(frozen=True)
class WentBack:
    """Where a run went back to.

    Attributes:
        path: the checkpoint.
        tried: steps that had been tried when it was written.
    """

    path: Path
    tried: int


def go_back(trainer: Trainer, began: float, why: str) -> WentBack:
    """Put back the newest whole checkpoint of this training, or the one that it was resumed from. Collective.

    A checkpoint that is being written is waited for.

    Args:
        trainer: at a step boundary, its gradients cleared.
        began: when this training began, in seconds since 1970: what is older in its directory is of another one.
        why: for the error.

    Raises:
        TrainingDiverged: there is none.
    """
    trainer.settle_save(wait=True)
    path = _newest(trainer, began, why)
    resumption = Resumption.of(path)
    trainer.restore(resumption)
    run: Any = resumption.run or {}
    return WentBack(path, run.get("divergence", {}).get("incidents", {}).get("tried", resumption.state.global_step))


def _newest(trainer: Trainer, began: float, why: str) -> Path:
    sharing, output_dir = trainer._sharing, Path(trainer.args.output_dir or ".")
    nothing = f"{why} There is no checkpoint of this training to go back to"
    try:
        path, manifest = choose_checkpoint(None, output_dir, sharing)
        # Clocks of machines differ; the main process wrote it, or somebody close to it.
        if distributed.broadcast_object(manifest.written >= began):
            return path
    except BrokenCheckpoint:
        pass
    resumed = trainer._resumption
    if resumed is None:
        raise TrainingDiverged(f"{nothing}: training stops; the weights are those before this step.")
    changes = trainer._changes
    if changes.optimizer or changes.schedule:
        raise TrainingDiverged(f"{nothing} since optimizer or schedule were changed: training stops.")
    try:
        return choose_checkpoint(resumed.path, output_dir, sharing)[0]
    except BrokenCheckpoint as error:
        raise TrainingDiverged(f"{nothing} ({error}): training stops.") from error


def in_place_of(now: TrainerState, restored: TrainerState) -> TrainerState:
    """``now`` with the values of ``restored``: who holds the object, as the loop and callbacks do, sees them."""
    vars(now).update(vars(restored))
    return now

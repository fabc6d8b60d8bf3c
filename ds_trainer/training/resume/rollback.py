"""Selects the checkpoint for a rollback."""

from __future__ import annotations

from pathlib import Path

from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint
from ds_trainer.checkpoint.selection import resolve, verify_checkpoint
from ds_trainer.monitor.health.divergence import TrainingDiverged
from ds_trainer.training.resume.compatibility import Changes
from ds_trainer.training.resume.output_directory import OutputDirectory
from ds_trainer.training.resume.resumption import Resumption
from ds_trainer.utils import distributed


def rollback_checkpoint(
    directory: OutputDirectory, resumption: Resumption | None, changes: Changes, reason: str
) -> Path:
    """The newest valid checkpoint of this training, or the one from which it resumed. Collective.

    Args:
        directory: the output directory of the training.
        resumption: the checkpoint from which it resumed.
        changes: the arguments that had changed since that checkpoint was written.
        reason: for the error message.

    Raises:
        TrainingDiverged: there is no such checkpoint.
    """
    nothing = f"{reason} There is no checkpoint of this training for a rollback"
    try:
        path, manifest = resolve(None, directory.path, directory.writer_group)
        if distributed.broadcast_object(manifest.generation >= directory.first_generation):
            return path
    except BrokenCheckpoint:
        pass
    if resumption is None:
        raise TrainingDiverged(f"{nothing}: training stops; the weights are those before this step.")
    if changes.optimizer:
        raise TrainingDiverged(f"{nothing} with the current optimizer, which was changed on resume: training stops.")
    try:
        return verify_checkpoint(resumption.path, directory.writer_group, distributed).path
    except BrokenCheckpoint as error:
        raise TrainingDiverged(f"{nothing} ({error}): training stops.") from error

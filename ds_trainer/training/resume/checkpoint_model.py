"""The model files in the checkpoints of a training."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.checkpoint.protocol.retention import bytes_on_disk
from ds_trainer.checkpoint.protocol.writer_group import WriterGroup
from ds_trainer.checkpoint.shards.model_plan import ModelPlan
from ds_trainer.checkpoint.weights.adapter_files import saves_adapters
from ds_trainer.checkpoint.weights.checkpoint_size import CheckpointSize
from ds_trainer.checkpoint.weights.model_saving import NoModelFiles, plan_model_files
from ds_trainer.engine.state.buffers import Shapes, buffer_shapes
from ds_trainer.optim.script_optimizers import swaps_weights
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import parse_size

if TYPE_CHECKING:
    from torch import nn

    from ds_trainer.arguments.training_arguments import TrainingArguments

logger = get_logger(__name__)


class ModelFiles:
    """The model files of one training.

    Args:
        model, optimizer, args: those of the run.
        writer_group: the ranks that share the output directory.
        frozen: names of frozen weights.
        replaced: whether a subclass writes other files in their place.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        args: TrainingArguments,
        writer_group: WriterGroup,
        frozen: Collection[str],
        replaced: bool = False,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._args = args
        self._writer_group = writer_group
        self._frozen = frozen
        left_out = replaced or not args.save_model_in_checkpoints or args.save_only_model or saves_adapters(model)
        self._planned: tuple[ModelPlan | None] | None = (None,) if left_out else None
        self._buffers: Shapes = {}  # when it was planned

    def plan(self) -> ModelPlan | None:
        """The plan of the model files in the next checkpoint; None if there are none. Collective."""
        if self._planned == (None,):
            return None
        shapes = buffer_shapes(self._model)
        # A buffer may have grown, or another one is there, on any rank.
        if self._planned is None or distributed.agree(torch.tensor([int(shapes != self._buffers)]))[0]:
            self._planned, self._buffers = (self._plan(shapes),), shapes
        return self._planned[0]

    def _plan(self, shapes: Shapes) -> ModelPlan | None:
        """The plan, or None (rank 0 logs the reason). Collective."""
        model, optimizer = self._model, self._optimizer
        reason = ""
        if self._writer_group.nodes > 1:
            reason = "save_on_each_node=True: each machine has only the shards of its own ranks"
        elif swaps_weights(optimizer):
            reason = (
                f"{type(optimizer).__name__} evaluates with other weights than it trains; save_model() writes the "
                "weights for evaluation"
            )
        else:
            plan = None
            try:
                plan = plan_model_files(model, parse_size(self._args.max_shard_size), self._frozen)
            except NoModelFiles as error:
                reason = str(error)
            # Each rank writes at the offsets of its plan, so all plans must be equal; rank 0 writes the buffers.
            if not distributed.alike(repr(shapes)):
                plan, reason = distributed.broadcast_object((plan, reason))
            elif plan is not None and not distributed.alike(repr([(f.name, f.size, f.header) for f in plan.files])):
                plan = None
                reason = (
                    "only some ranks loaded the model with from_pretrained, so the names of its weights differ between "
                    "ranks"
                )
            if plan is not None:
                return plan
        logger.warning(
            "Runs can resume from the checkpoints, but from_pretrained cannot read them (%s). "
            "To avoid this warning, set save_model_in_checkpoints=False.",
            reason,
        )
        return None


def announce(size: CheckpointSize, output_dir: Path, limit: int | str | None) -> str:
    """Describe the size of a checkpoint, and warn if the disk is too small for ``limit`` of them.

    Args:
        size: the size of a checkpoint.
        output_dir: the directory of the checkpoints; existing ones there may be removed to make room.
        limit: ``save_total_limit``; a new checkpoint is written before an old one is removed.

    Returns:
        The text to print.
    """
    free, present = shutil.disk_usage(output_dir).free, bytes_on_disk(output_dir.glob("checkpoint-*"))
    once = f" (including {readable(size.frozen)} of frozen weights, written once)" if size.frozen else ""
    text = (
        f"A checkpoint takes {readable(size.total)}: {readable(size.weights)} weights{once}, {readable(size.states)} "
        f"optimizer states; free on the disk of {output_dir}: {readable(free)}."
    )
    if isinstance(limit, str):
        needed = max(parse_size(limit), size.of(1)) + size.total - size.frozen
    else:
        needed = size.of(1 if limit is None else limit + 1)
    if needed > free + present:
        logger.warning(
            "The disk of %s has %s free, and checkpoints will take %s: save_total_limit=%s, and a new one is written "
            "before an old one is removed. Make room, lower save_total_limit, or save less often.",
            output_dir,
            readable(free),
            readable(needed),
            limit,
        )
    return text


def readable(size: int) -> str:
    """A number of bytes with a unit."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= one:
            return f"{size / one:.1f} {unit}"
    return f"{size / 1000:.1f} kB"

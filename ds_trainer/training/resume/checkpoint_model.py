"""The model files in the checkpoints of a training."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ds_trainer.checkpoint.protocol.writer_group import WriterGroup
from ds_trainer.checkpoint.shards.model_plan import ModelPlan
from ds_trainer.checkpoint.weights.adapter_files import saves_adapters
from ds_trainer.checkpoint.weights.model_file_planning import NoModelFiles, plan_model_files
from ds_trainer.optim.weight_swapping import swaps_weights
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.sizes import parse_size

if TYPE_CHECKING:
    from torch import nn

    from ds_trainer.arguments.training_arguments import TrainingArguments

logger = get_logger(__name__)


def plan_of_checkpoints(
    model: nn.Module, optimizer: Any, args: TrainingArguments, writer_group: WriterGroup, frozen: Collection[str]
) -> tuple[ModelPlan | None]:
    """The plan of the model files in each checkpoint; None if there are none (rank 0 logs the reason). Collective."""
    if not args.save_model_in_checkpoints or args.save_only_model or saves_adapters(model):
        return (None,)
    reason = ""
    if writer_group.nodes > 1:
        reason = "save_on_each_node=True: each machine has only the shards of its own ranks"
    elif swaps_weights(optimizer):
        reason = (
            f"{type(optimizer).__name__} evaluates with other weights than it trains; save_model() writes the weights "
            "for evaluation"
        )
    else:
        try:
            plan = plan_model_files(model, parse_size(args.max_shard_size), frozen)
            # Each rank writes at the offsets of its own plan, so all plans must be equal.
            if distributed.alike(repr([(file.name, file.size, file.header) for file in plan.files])):
                return (plan,)
            reason = (
                "only some ranks loaded the model with from_pretrained, so the names of its weights differ between "
                "ranks"
            )
        except NoModelFiles as error:
            reason = str(error)
    logger.warning(
        "Runs can resume from the checkpoints, but from_pretrained cannot read them (%s). "
        "To avoid this warning, set save_model_in_checkpoints=False.",
        reason,
    )
    return (None,)

"""Whether the checkpoints of a training are models too, and by which files."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ds_trainer.checkpoint.pieces.model_plan import ModelPlan
from ds_trainer.checkpoint.protocol.sharing import Sharing
from ds_trainer.checkpoint.weights.adapters import saves_adapters
from ds_trainer.checkpoint.weights.planning import NoModelFiles, plan_model
from ds_trainer.optim.swapping import swaps_weights
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.sizes import parse_size

if TYPE_CHECKING:
    from torch import nn

    from ds_trainer.arguments.training_arguments import TrainingArguments

logger = get_logger(__name__)


def plan_of_checkpoints(
    model: nn.Module, optimizer: Any, args: TrainingArguments, sharing: Sharing, frozen: Collection[str]
) -> tuple[ModelPlan | None]:
    """The weight files of each checkpoint; None where it has none, of which rank 0 says why. Collective."""
    if not args.save_model_in_checkpoints or args.save_only_model or saves_adapters(model):
        return (None,)
    reason = ""
    if sharing.nodes > 1:
        reason = "save_on_each_node=True: each machine has only what its own ranks hold"
    elif swaps_weights(optimizer):
        reason = f"{type(optimizer).__name__} evaluates other weights than it trains; save_model() writes those"
    else:
        try:
            plan = plan_model(model, parse_size(args.max_shard_size), frozen)
            # Each rank writes where its own plan says.
            if distributed.alike(repr([(file.name, file.size, file.head) for file in plan.files])):
                return (plan,)
            reason = (
                "ranks loaded the model in different ways, from_pretrained on some only, and would name its weights"
            )
            reason += " differently"
        except NoModelFiles as error:
            reason = str(error)
    if sharing.rank == 0:
        logger.warning(
            "Checkpoints can be resumed from, but from_pretrained cannot read them (%s). "
            "save_model_in_checkpoints=False says so without this warning.",
            reason,
        )
    return (None,)

"""``auto_find_batch_size``: the largest micro-batch that fits on every rank, for the same global batch.

Before training, the first micro-batches are rehearsed (:mod:`ds_trainer.engine.rehearsal`): a rank that runs out of
memory says so, and then all ranks halve the micro-batch and raise the accumulation, so that the global batch, the order
of samples, the steps and the numbers stay what they were. A rehearsal never leaves ranks waiting for each other.

What it cannot know: that a later batch is longer than those of the first step. Let the collator pad to one length, or
sort by length with the longest first, where that matters.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from ds_trainer.engine.rehearsal import rehearse
from ds_trainer.training.item_count import ItemCount
from ds_trainer.training.loss import LossRule
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.trainer import Trainer

logger = get_logger(__name__)


def smaller_micro_batch(micro_batch: int, accumulation: int) -> tuple[int, int]:
    """At most half the micro-batch with so much more accumulation that their product stays.

    Raises:
        ValueError: the micro-batch is one sample.
    """
    product = micro_batch * accumulation
    for size in range(micro_batch // 2, 0, -1):
        if product % size == 0:
            return size, product // size
    raise ValueError("a micro-batch of one sample cannot be smaller")


def find_batch_size(trainer: Trainer) -> None:
    """Give ``trainer`` the arguments and the configuration of the largest micro-batch that fits. Collective.

    Its ``args`` are then a changed copy; those that the user holds stay.

    Raises:
        ConfigError: not even one sample fits, or an optimizer was handed in that an engine would use up.
    """
    given = trainer.optimizer
    if given is not None:
        raise ConfigError(
            f"auto_find_batch_size=True, but optimizers=({type(given).__name__}, ...) handed to the Trainer can be "
            "used by one engine only. Pass optimizer_cls_and_kwargs=(class, arguments) instead."
        )
    while True:
        size, accumulation = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
        own = _out_of_memory(trainer)
        if not distributed.agree(torch.tensor([int(own is not None)]))[0]:
            return
        who = [rank for rank, text in enumerate(distributed.gather_objects(own)) if text is not None]
        if size == 1:
            raise ConfigError(
                f"auto_find_batch_size: out of memory on rank {who[0]} with one sample in a micro-batch. Shorten the "
                "samples, set activation_checkpointing=True, a higher zero_stage, or offload_optimizer=cpu."
            )
        smaller = smaller_micro_batch(size, accumulation)
        level = logging.WARNING if trainer.is_world_process_zero() else logging.DEBUG
        logger.log(
            level,
            "auto_find_batch_size: out of memory on %s %s with %d samples in a micro-batch; now %d, with %d instead of "
            "%d accumulation steps. The global batch stays at %d.",
            *("ranks" if len(who) > 1 else "rank", ", ".join(map(str, who)), size, *smaller, accumulation),
            trainer.batch_plan.step_size,
        )
        set_micro_batch(trainer, *smaller)


def set_micro_batch(trainer: Trainer, size: int, accumulation: int) -> None:
    """Let ``trainer`` use micro-batches of ``size`` samples; compiles anew."""
    trainer.args = copy.copy(trainer.args)
    trainer.args.per_device_train_batch_size = size
    trainer.args.gradient_accumulation_steps = accumulation
    trainer.compiled = trainer._compile()
    trainer._settled_with = dict(vars(trainer.args))


def _out_of_memory(trainer: Trainer) -> str | None:
    """Rehearse the first step; what this rank ran out of memory with, or None. Leaves no engine behind."""
    from accelerate.utils.memory import should_reduce_batch_size

    loader = trainer.get_train_dataloader()
    if hasattr(loader, "start"):
        loader.start(0)
    # Two show the gradients of one micro-batch beside the activations of the next.
    batches = list(itertools.islice(loader, min(2, trainer.args.gradient_accumulation_steps)))
    trainer._build(1)
    rule = trainer.loss_rule
    # The rule is not to be verified by worthless numbers.
    trainer.loss_rule = LossRule(rule.count, rule.normalised, rule.auxiliary)
    trainer.loss_rule.verified = True
    trainer._items = count = ItemCount(torch.ones((), device=trainer.device))
    try:
        passes = [partial(trainer.call_training_step, batch, count) for batch in batches]
        rehearse(trainer.engine, passes, trainer.device)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        return str(error)
    finally:
        trainer.loss_rule = rule
        trainer._begin_anew()
        gc.collect()
        if trainer.device.type == "cuda":
            torch.cuda.empty_cache()
    return None

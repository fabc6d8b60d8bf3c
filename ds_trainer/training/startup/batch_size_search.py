"""``auto_find_batch_size``: the largest micro-batch that fits on every rank, for the same global batch.

Before training, all ranks rehearse the first micro-batches (:mod:`ds_trainer.engine.rehearsal`). If a rank runs out of
memory, all ranks halve the micro-batch and increase the accumulation: the global batch, the order of samples, the steps
and the results do not change. A rehearsal never leaves ranks waiting for each other.

A later batch may be longer than those of the first step. Then the micro-batch is halved during the training
(:mod:`ds_trainer.training.loop.memory_recovery`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.engine.rehearsal import rehearse
from ds_trainer.parallel.batch_plan import smaller_micro_batch
from ds_trainer.training.loop.item_count import ItemCount
from ds_trainer.training.loop.loss_computation import LossComputation
from ds_trainer.training.loop.loss_rule import LossRule
from ds_trainer.training.loop.step import MicroBatchRunner
from ds_trainer.training.out_of_memory import is_out_of_memory
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.engine.training_engine import TrainingEngine

logger = get_logger(__name__)


def find_batch_size(
    args: TrainingArguments,
    global_batch_size: int,
    given_optimizer: Any,
    rehearse: Callable[[], str | None],
    resize: Callable[[int, int], TrainingArguments],
) -> None:
    """Find the largest micro-batch that fits, for the same global batch. Collective.

    Args:
        args: the training arguments.
        global_batch_size: samples of a step.
        given_optimizer: the optimizer of the user; None if the Trainer builds it.
        rehearse: rehearses the first step; returns the out-of-memory message of this rank, or None.
        resize: makes the Trainer use another micro-batch and accumulation; returns its new arguments.

    Raises:
        ConfigError: not even one sample fits, or the user passed an optimizer, which only one engine can use.
    """
    if given_optimizer is not None:
        raise ConfigError(
            f"auto_find_batch_size=True, but optimizers=({type(given_optimizer).__name__}, ...) passed to the Trainer "
            "can be used by one engine only. Pass optimizer_cls_and_kwargs=(class, arguments) instead."
        )
    while True:
        size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        failure = rehearse()
        if not distributed.agree(torch.tensor([int(failure is not None)]))[0]:
            return
        ranks = [rank for rank, text in enumerate(distributed.gather_objects(failure)) if text is not None]
        if size == 1:
            raise ConfigError(
                f"auto_find_batch_size: out of memory on rank {ranks[0]} with one sample in a micro-batch. Shorten the "
                "samples, set activation_checkpointing=True, a higher zero_stage, or offload_optimizer=cpu."
            )
        smaller = smaller_micro_batch(size, accumulation)
        logger.warning(
            "auto_find_batch_size: out of memory on %s %s with %d samples in a micro-batch; now %d, with %d instead of "
            "%d accumulation steps. The global batch stays at %d.",
            *("ranks" if len(ranks) > 1 else "rank", listed(ranks), size, *smaller, accumulation),
            global_batch_size,
        )
        args = resize(*smaller)


def rehearse_first_step(
    loader: Any,
    accumulation: int,
    engine: TrainingEngine,
    micro_batches: MicroBatchRunner,
    losses: LossComputation,
    device: torch.device,
) -> str | None:
    """Run the first micro-batches of a step. Returns the out-of-memory message of this rank, or None."""
    if hasattr(loader, "start"):
        loader.start(0)
    # Two are enough: the gradients of the first and the activations of the second are in memory together.
    batches = list(itertools.islice(loader, min(2, accumulation)))
    rule = losses.rule
    # The rehearsal must not verify the rule: its item count is not real.
    losses.rule = LossRule(rule.count, rule.normalized, rule.auxiliary)
    losses.rule.verified = True
    losses.items = count = ItemCount(torch.ones((), device=device))
    try:
        passes = [partial(micro_batches.run, batch, count, 0, index) for index, batch in enumerate(batches)]
        rehearse(engine, passes, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return str(error)
    finally:
        losses.rule = rule
    return None

"""Lets loaders send each rank its shard of a micro-batch, where nothing needs the whole: in trainings, evaluations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ds_trainer.data.batch_structure import number_of_samples
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.sequence_sharding import SequenceSharder
from ds_trainer.data.sharded_batch import BatchFacts, BatchSharder
from ds_trainer.data.stream import StreamLoader
from ds_trainer.training.loop.loss_computation import LossComputation
from ds_trainer.training.loop.token_counter import TokenCounter

_BEGINNING = 4096  # tokens of a row


def cut_for_ranks(
    loader: Any, losses: LossComputation, counter: TokenCounter, overridden: Collection[str], splits: bool
) -> None:
    """Cut the micro-batches of ``loader`` if sequences are sharded and nothing reads whole batches.

    Args:
        loader: the loader of the training; one of a user gives whole batches.
        losses: shards sequences and counts items.
        counter: measures whole batches.
        overridden: names of the methods that a subclass or the Trainer itself replaces; ``get_batch_samples`` may read
            batches.
        splits: whether micro-batches may be split by rows (``auto_find_batch_size``).
    """
    needs_whole = splits or "get_batch_samples" in overridden
    if losses.sharder is None or needs_whole or not isinstance(loader, (PlannedLoader, StreamLoader)):
        return

    def describe(batch: Any) -> BatchFacts:
        text = () if losses.rows is None else losses.rows.ends_of_text(batch)
        return BatchFacts(losses.rule.count(batch), counter.size(batch), text=text)

    loader.cut_with(BatchSharder(losses.sharder, describe, beginning_of(loader, losses.sharder)))


@contextmanager
def cut_while_evaluating(
    loader: Any, losses: LossComputation, has_loss: Callable[[Mapping[str, Any]], bool]
) -> Iterator[None]:
    """Inside, the micro-batches of ``loader`` are cut if sequences are sharded. Only if nothing reads whole batches.

    Args:
        loader: the loader of the evaluation; one of a user gives whole batches.
        losses: shards sequences and counts items.
        has_loss: whether a batch has a loss.
    """
    if losses.sharder is None or not isinstance(loader, (PlannedLoader, StreamLoader)):
        yield
        return

    def describe(batch: Mapping[str, Any]) -> BatchFacts:
        return BatchFacts(losses.rule.count(batch), number_of_samples(batch), has_loss(batch))

    loader.cut_with(BatchSharder(losses.sharder, describe, beginning_of(loader, losses.sharder)))
    try:
        yield
    finally:
        loader.cut_with(None)


def beginning_of(loader: Any, sharder: SequenceSharder) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Makes a short batch of one of ``loader``, for the checks that compare results for a few tokens."""
    from ds_trainer.data.packing.batch import PackingCollator

    tokens = max(_BEGINNING, 4 * sharder.layout.cp * sharder.layout.sp)
    collate = loader.collate_fn
    if isinstance(collate, PackingCollator):  # several samples of a row, and not only the first
        return partial(collate.format.beginning, tokens=tokens)
    return partial(sharder.beginning, tokens=tokens)

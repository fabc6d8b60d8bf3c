"""The batches of an evaluation: every rank runs the same number of forward passes, and every sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.replica import batches_of
from ds_trainer.data.sharded_batch import ShardedBatch, dummy_of
from ds_trainer.data.stream import StreamLoader
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.batches import checked_batch
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError


def aligned_batches(
    loader: Iterable[Any], layout: ParallelLayout, check: Callable[[Any], Any] = checked_batch
) -> Iterator[Any]:
    """The batches of ``loader``: equally many on every rank, and on all ranks of a replica equal, or its shards.

    Loaders of this package have a batch plan. A user's loader may return more batches on one rank than on another: a
    rank without further batches repeats its last one as a dummy until all ranks are done. This costs one small
    collective per batch.

    Args:
        loader: the loader of this rank.
        layout: defines the replicas.
        check: returns its argument if it can be a batch.

    Raises:
        ConfigError: on all ranks, if a rank has no batch at all while others do.
    """
    if isinstance(loader, PlannedLoader) or distributed.world_size() == 1:
        for batch in loader:
            yield batch if isinstance(batch, ShardedBatch) else check(batch)
        return
    iterator = iter(loader) if isinstance(loader, StreamLoader) else batches_of(loader, layout)
    last: Any = None
    while True:
        batch = next(iterator, None)
        has_one, has_none_ever = distributed.agree(
            torch.tensor([int(batch is not None), int(batch is None and last is None)])
        )
        if not has_one:
            return
        if has_none_ever:
            raise ConfigError(
                "The evaluation loader of at least one rank has no batch, while others have some. Return at least one "
                "batch on every rank, or use the Trainer's get_eval_dataloader, which divides the samples evenly."
            )
        if batch is not None:
            last = batch if isinstance(batch, ShardedBatch) else check(batch)
            yield last
        else:
            assert last is not None  # agreed above
            yield dummy_of(last)


def mark_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each of ``batches``, and whether it is the last one; reads one batch ahead."""
    iterator = iter(batches)
    current = next(iterator, None)
    while current is not None:
        following = next(iterator, None)
        yield current, following is None
        current = following

"""The rounds of an evaluation: every rank runs the same number of forward passes, and none hears twice of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ds_trainer.data.loader import FillerBatch, PlannedLoader
from ds_trainer.data.replica import batches_of
from ds_trainer.data.stream import StreamLoader
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.batches import checked_batch
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError


def rounds_in_step(loader: Iterable[Any], layout: ParallelLayout) -> Iterator[Mapping[str, Any]]:
    """The batches of ``loader``, as many on every rank and the same on all ranks of a replica.

    Loaders of this package know their plan. Those of others may give more batches on one rank than on another: a rank
    that has no more repeats its last batch as a filler until all are done. One small collective a round then.

    Raises:
        ConfigError: a rank has no batch at all while others do; on all ranks.
    """
    if isinstance(loader, PlannedLoader) or distributed.world_size() == 1:
        yield from map(checked_batch, loader)
        return
    iterator = iter(loader) if isinstance(loader, StreamLoader) else batches_of(loader, layout)
    last: Mapping[str, Any] | None = None
    while True:
        batch = next(iterator, None)
        has_one, has_none_ever = distributed.agree(
            torch.tensor([int(batch is not None), int(batch is None and last is None)])
        )
        if not has_one:
            return
        if has_none_ever:
            raise ConfigError(
                "The evaluation loader of at least one rank gives no batch, while others have some. Let every rank's "
                "loader have one, or leave get_eval_dataloader to the Trainer, which deals samples out evenly."
            )
        if batch is not None:
            last = checked_batch(batch)
            yield last
        else:
            assert last is not None  # agreed above
            yield FillerBatch(last)


def with_last_marked(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each of ``batches`` with whether it is the last one; reads one ahead."""
    iterator = iter(batches)
    current = next(iterator, None)
    while current is not None:
        following = next(iterator, None)
        yield current, following is None
        current = following

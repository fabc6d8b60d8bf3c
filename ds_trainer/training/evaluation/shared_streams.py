"""Evaluation of a stream of which each replica reads its shards (``stream_shards``), with the numbers of the whole one.

The replicas' micro-batches are gathered in the order of :class:`~ds_trainer.data.stream_shards.StreamOrder`, and the
results are then put into the order of the stream: one shard after the other. That is exact for an IterableDataset of
``datasets`` whose operations are on single samples: its shards, joined, are the dataset (``IterableDataset.shard``).
``take``, ``skip``, a shuffle buffer, a batched ``map`` or indices depend on what comes before in the stream, so such a
stream is read whole by every replica; as are streams of other classes, whose order nothing is known about.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.stream import StreamLoader
from ds_trainer.data.stream_shards import READERS, shards_in, stream_order
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.evaluation.nested import map_leaves
from ds_trainer.training.loop.run_plan import evaluation_plan_of
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_BY_SAMPLE = frozenset(
    f"{kind}Iterable"
    for kind in (
        "Examples",
        "ArrowExamples",
        "SelectColumns",
        "MappedExamples",
        "FilteredExamples",
        "FormattedExamples",
    )
)
"""Classes of ``datasets`` (5.2, ``iterable_dataset.py``) of which each sample depends on one sample of the source."""


def share_reading(loader: Any, args: TrainingArguments, layout: ParallelLayout, loss_only: bool) -> bool:
    """Let each replica read its shards of the stream of ``loader``, if the numbers stay the same.

    Args:
        loader: a loader of an evaluation that has not been read.
        args: ``stream_shards``, and how results are collected.
        layout: the replicas.
        loss_only: whether nothing but the loss is needed, which has no order.

    Returns:
        Whether results have to be put into order with :func:`in_order_of_stream`.
    """
    if not isinstance(loader, StreamLoader) or layout.dp == 1:
        return False
    stream, setting = loader.stream, args.stream_shards
    plan, replica = evaluation_plan_of(args, layout), layout.coordinates(distributed.rank()).dp
    whole = stream_order(stream, plan, replica)
    as_one_array = args.eval_do_concat_batches and not (args.eval_use_gather_object or args.batch_eval_metrics)
    exact = joins_in_order(stream) and (loss_only or as_one_array) and not loader.drop_last
    if whole.own or not exact or setting == "own" or (isinstance(setting, int) and setting > shards_in(stream)):
        setting = None
    order = stream_order(stream, plan, replica, setting, loader.num_workers)
    if order.shards and not order.own:
        loader.start(0, order=order)
        loader.window = 1  # a micro-step whose shards have all ended is left out: it has no results
        return True
    if not order.own and layout.dp >= READERS and distributed.rank() == 0:
        _warn_once(type(stream).__name__, layout.dp, exact and shards_in(stream) > 1)
    return False


@functools.cache
def _warn_once(kind: str, replicas: int, exact: bool) -> None:
    logger.warning(
        "Each sample of the evaluation's %s is read by %d replicas and used by one. %s",
        *(kind, replicas),
        "With stream_shards='auto' each replica reads its own."
        if exact
        else "Replicas can share the reading of an IterableDataset of datasets with several files and operations on "
        "single samples only (no take, skip, shuffle, batched map or indices), whose results are joined to one array.",
    )


def joins_in_order(stream: Any) -> bool:
    """Whether the shards of ``stream``, one after the other, are known to be the stream."""
    examples = getattr(stream, "_ex_iterable", None)
    known = examples is not None
    while known and examples is not None:
        known = type(examples).__name__ in _BY_SAMPLE
        known = known and not (getattr(examples, "batched", False) or getattr(examples, "with_indices", False))
        examples = getattr(examples, "ex_iterable", None)
    return known


def in_order_of_stream(results: Any, loader: StreamLoader) -> Any:
    """The arrays of ``results``, gathered micro-batch by micro-batch, in the order of the stream. Collective.

    Raises:
        ConfigError: an array has not one row for each sample.
    """
    order = _rows_of_samples(loader)

    def in_order(array: Any) -> Any:
        if len(array) != len(order):
            raise ConfigError(
                f"An output of the evaluation has length {len(array)}, and the stream {len(order)} samples, so the "
                "order of the stream cannot be restored. Name it in ignore_keys, or leave out stream_shards."
            )
        return array[order]

    return map_leaves(in_order, results)


def _rows_of_samples(loader: StreamLoader) -> np.ndarray:
    """For each sample of the stream, its row in the gathered results. Collective."""
    assert loader.order is not None  # it has been read
    shards, run = loader.order.shards, loader.order.run
    lengths = torch.zeros(shards, dtype=torch.int64)
    for number, read in loader.rows_read.items():
        lengths[number] = read
    lengths = lengths.to(distributed.collective_device())
    distributed.all_reduce_sum(lengths)
    length = lengths.cpu().numpy()
    turn = np.arange(shards * -(-int(length.max()) // run))
    shard, index = turn % shards, turn // shards * run
    rows = np.clip(length[shard] - index, 0, run)
    first = (np.cumsum(length) - length)[shard] + index
    positions = np.repeat(first - (np.cumsum(rows) - rows), rows) + np.arange(rows.sum())
    return np.argsort(positions, kind="stable")

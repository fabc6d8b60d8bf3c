"""Builds the data loaders of a run, and checks datasets and batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Sampler

from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.redefined import packs
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.batch_structure import kind_of
from ds_trainer.data.columns import accepts_any_keyword, base_model, forward_names
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.order import SamplerOrder
from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.data.source_ids import SOURCE_IDS
from ds_trainer.data.stream import StreamLoader, StreamShard, is_stream, length_of
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.data.lengths import Lengths

logger = get_logger(__name__)


def check_dataset(dataset: Any, name: str, plan: BatchPlan) -> None:
    """Reject an object that is no dataset, and a dataset that is too small.

    Raises:
        ConfigError: names ``name`` and the problem.
    """
    if is_stream(dataset):
        return  # an empty stream is detected when it is read
    if not hasattr(dataset, "__getitem__") or length_of(dataset) is None:
        raise ConfigError(
            f"{name}: a {type(dataset).__name__} is no dataset: it has no length or no items. Pass an object with "
            "__len__ and __getitem__, or one with __iter__."
        )
    if plan.micro_steps(len(dataset)) == 0:
        needed = (
            f"; dataloader_drop_last drops micro-steps of less than {plan.samples_per_micro_step}"
            if plan.drop_last
            else ""
        )
        raise ConfigError(f"{name} is empty: it has {len(dataset)} samples{needed}.")


def check_run_length(dataset: Any, args: TrainingArguments) -> None:
    """Reject data without length if the length of the run is given in epochs.

    Raises:
        ConfigError: asks for ``max_steps``.
    """
    unknown = packs(args) or length_of(dataset) is None or args.stream_shards is not None
    if args.max_steps <= 0 and is_stream(dataset) and unknown:
        raise ConfigError(_NO_LENGTH.format(f"train_dataset, a {type(dataset).__name__},", args.max_steps))


_NO_LENGTH = (
    "{0} has no length, so the number of steps in num_train_epochs is unknown, and max_steps={1}. Set max_steps to the "
    "number of optimizer steps; the data is then read repeatedly until this number is reached."
)


class Sampling:
    """The order and the distribution of training samples: ``args.train_sampling_strategy``, ``sortish_sampler``.

    Args:
        args: the training arguments.
        dataset: the data with all its columns; one of them may be the length of each sample.
        processing_class: has the name of the first model input, whose length is used if there is no such column.
        order: yields the positions of each epoch; None: as the arguments say.
    """

    def __init__(
        self,
        args: TrainingArguments,
        dataset: Any,
        processing_class: Any = None,
        order: Sampler[int] | None = None,
    ) -> None:
        self.order = order
        self.strategy = args.train_sampling_strategy
        self.seed: int = args.seed if args.data_seed is None else args.data_seed
        self._lengths: Lengths | None = None
        self._sortish = bool(getattr(args, "sortish_sampler", False))
        by_length = self.strategy in (SamplingStrategy.GROUP_BY_LENGTH, SamplingStrategy.BATCH_REBALANCE)
        if order is not None or not (self._sortish or by_length):
            return
        asked_by = "sortish_sampler" if self._sortish else "train_sampling_strategy"
        if is_stream(dataset):
            logger.warning(
                "%s=%s is ignored: a %s is read in its own order.",
                asked_by,
                getattr(args, asked_by),
                type(dataset).__name__,
            )
            return
        self._lengths = _lengths(args, dataset, processing_class, asked_by)

    def sampler(self, plan: BatchPlan, samples: int, dp_rank: int) -> DistributedBatchSampler:
        """The sampler of replica ``dp_rank``."""
        if self.order is not None:
            return in_order_of(self.order, plan, dp_rank, self.seed)
        order = None
        if self._lengths is not None:
            from ds_trainer.data.lengths import BalancedBatchSampler, GroupedByLength, RoughlySorted

            if self.strategy == SamplingStrategy.BATCH_REBALANCE:
                return BalancedBatchSampler(plan, self._lengths, dp_rank, self.seed)
            kind = RoughlySorted if self._sortish else GroupedByLength
            order = kind(self._lengths, plan.global_batch_size, self.seed)
        return DistributedBatchSampler(
            plan, samples, dp_rank, self.seed, self.strategy != SamplingStrategy.SEQUENTIAL, order
        )


class EpochOrder(Sampler[int]):
    """The order that the arguments describe, over all replicas.

    Args:
        sampling: what the arguments describe.
        plan: the batch arithmetic.
        samples: length of the dataset.
    """

    def __init__(self, sampling: Sampling, plan: BatchPlan, samples: int) -> None:
        self.sampling = sampling
        self._batches = sampling.sampler(plan, samples, 0)

    def __len__(self) -> int:
        return self._batches.samples

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches.positions(0, self._batches.samples))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._batches.set_epoch(epoch)


def in_order_of(order: Sampler[int], plan: BatchPlan, dp_rank: int, seed: int) -> DistributedBatchSampler:
    """The batches of replica ``dp_rank`` if ``order`` yields the positions of each epoch.

    Raises:
        ConfigError: the sampler has no length or yields nothing.
    """
    samples = length_of(order)
    if not samples:
        raise ConfigError(
            f"The sampler, a {type(order).__name__}, has no length or length 0: give it a __len__ that returns the "
            "number of positions that it yields in an epoch."
        )
    return DistributedBatchSampler(plan, samples, dp_rank, seed, order=SamplerOrder(order))


def _lengths(args: TrainingArguments, dataset: Any, processing_class: Any, asked_by: str) -> Lengths:
    from ds_trainer.data.lengths import sample_lengths

    names = getattr(processing_class, "model_input_names", None)
    return sample_lengths(dataset, args.length_column_name, names[0] if names else "input_ids", asked_by)


def lengths_for_evaluation(args: TrainingArguments, dataset: Any, processing_class: Any = None) -> Lengths | None:
    """The sample lengths for an evaluation in order of length; None if it is not requested or not possible.

    ``train_sampling_strategy=group_by_length`` requests it, as in transformers. Lists of batches or of objects
    (``eval_do_concat_batches=False``, ``eval_use_gather_object``) keep the order of the dataset.
    """
    asked = args.train_sampling_strategy == SamplingStrategy.GROUP_BY_LENGTH
    if not asked or is_stream(dataset) or args.eval_use_gather_object or not args.eval_do_concat_batches:
        return None
    try:
        return _lengths(args, dataset, processing_class, "train_sampling_strategy")
    except ConfigError as error:
        logger.warning("The evaluation keeps the order of the dataset: %s", error)
        return None


def planned_loader(
    dataset: Any,
    plan: BatchPlan,
    args: TrainingArguments,
    collate: Callable[[list[Any]], Any],
    sampling: Sampling | None = None,
    lengths: Lengths | None = None,
    order: Sampler[int] | None = None,
) -> PlannedLoader | StreamLoader:
    """The loader of this replica. Without ``sampling``, the order is ``order``, that of ``lengths`` or the dataset."""
    dp_rank = plan.layout.coordinates(distributed.rank()).dp
    pin = args.dataloader_pin_memory and args.device_type == "cuda"
    options: dict[str, Any] = {}
    if args.dataloader_num_workers > 0:
        options = {
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }
    workers = args.dataloader_num_workers
    if is_stream(dataset):
        from ds_trainer.data.stream_shards import stream_order, warn_of_readers

        setting = None if sampling is None else args.stream_shards  # results of an evaluation are in its order
        stream = stream_order(dataset, plan, dp_rank, setting, workers)
        if sampling is not None:
            warn_of_readers(dataset, stream, plan.layout.dp, setting)
        share = StreamShard(dataset, plan, dp_rank, collate, 0 if sampling is None else sampling.seed, stream)
        # Evaluation has no steps: the ranks synchronize after a fixed number of micro-batches instead.
        return StreamLoader(share, _EVAL_WINDOW if sampling is None else plan.accumulation, workers, pin, **options)
    sampler: DistributedBatchSampler
    if sampling is None and order is not None:
        sampler = in_order_of(order, plan, dp_rank, args.seed)
    elif sampling is None and lengths is not None:
        from ds_trainer.data.lengths import SortedBatchSampler

        sampler = SortedBatchSampler(plan, lengths, dp_rank)
    elif sampling is None:
        sampler = DistributedBatchSampler(plan, len(dataset), dp_rank, shuffle=False)
    else:
        sampler = sampling.sampler(plan, len(dataset), dp_rank)
    return PlannedLoader(dataset, sampler, collate, workers, pin, **options)


_EVAL_WINDOW = 8


def micro_steps_of(loader: Any) -> int | None:
    """Number of micro-batches in an epoch of ``loader``, the same on all ranks; None if it is unknown. Collective.

    Raises:
        ConfigError: the number differs between ranks, or is zero.
    """
    own = length_of(loader)
    micro_steps = [own] if distributed.alike(repr(own)) else distributed.gather_objects(own)
    if len(set(micro_steps)) > 1 or micro_steps[0] == 0:
        raise ConfigError(
            f"get_train_dataloader: the lengths of the loaders, by rank, are {micro_steps}; all must be equal and "
            "positive (or unknown on all ranks)."
        )
    return None if own is None else int(own)


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of a user's loader and of its samplers and dataset, if they have this method.

    Samplers may be wrapped, as by accelerate, which calls the innermost one only on one rank.
    """
    parts: list[Any] = [loader, getattr(loader, "dataset", None)]
    for part in parts:
        found = [getattr(part, name, None) for name in ("sampler", "batch_sampler") if part is not parts[1]]
        parts += [new for new in found if new is not None and not any(new is other for other in parts)]
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def checked_batch(batch: Any, why: str = "models are called with keyword arguments") -> Mapping[str, Any]:
    """Return ``batch`` if its items can be the keyword arguments of a model.

    Raises:
        ConfigError: it is no mapping, which is needed because of ``why``; or it has no tensor.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"A batch is a {kind_of(batch)}, but {why}: the data_collator must return a dict such as "
            "{'input_ids': ..., 'labels': ...}. A subclass whose compute_loss or training_step unpacks its batches "
            "may have batches of any type, where sequences are not sharded."
        )
    if not any(_holds_tensor(value) for value in batch.values()):
        kinds = ", ".join(f"{key}: {type(value).__name__}" for key, value in batch.items()) or "it is empty"
        raise ConfigError(
            f"A batch has no tensor ({kinds}): the data_collator must create tensors, with torch.tensor(...) or with "
            "return_tensors='pt'."
        )
    return batch


def checked_raw_batch(batch: Any) -> Any:
    """Return ``batch`` if it can be the argument of methods of a subclass that unpack it: anything but None.

    Raises:
        ConfigError: it is None.
    """
    if batch is None:
        raise ConfigError("A batch is None: the data_collator must return what it has made.")
    return batch


_UNPACK = frozenset({"_prepare_inputs", "compute_loss", "training_step"})
"""Methods of a subclass that may unpack a batch of another structure than a dict."""


def batch_check(overridden: Collection[str], layout: ParallelLayout) -> Callable[[Any], Any]:
    """What returns its argument if it can be a batch of a Trainer whose subclass replaces methods.

    Args:
        overridden: the names of these methods.
        layout: the layout of the job; where it shards sequences, batches have names.
    """
    if layout.cp * layout.sp > 1 and "_prepare_inputs" not in overridden:
        why = f"context_parallel_size={layout.cp} and sequence_parallel_size={layout.sp} shard its items by their names"
        return partial(checked_batch, why=why)
    return checked_batch if _UNPACK.isdisjoint(overridden) else checked_raw_batch


def check_names(batch: Mapping[str, Any], model: nn.Module) -> None:
    """Reject a batch with keys that are not arguments of ``model``.

    Raises:
        ConfigError: lists these keys and the arguments of the model.
    """
    names = forward_names(model)
    unknown = [key for key in batch if key not in names and key != SOURCE_IDS]
    if not unknown or accepts_any_keyword(model):
        return
    wanted = [name for name in names if name not in batch and "label" in name]
    hint = f"Rename '{unknown[0]}' to '{wanted[0]}'" if wanted and "label" in unknown[0] else "Remove it"
    raise ConfigError(
        f"The batches have {', '.join(map(repr, unknown))}, which {type(base_model(model)).__name__}.forward does not "
        f"take; it takes {', '.join(names)}. {hint} in the dataset or in the data_collator."
    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_holds_tensor, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor)


def labels_in(inputs: Mapping[str, Any], label_names: Sequence[str]) -> str | None:
    """The first of ``label_names`` that the batch has."""
    return next((name for name in label_names if name in inputs), None)

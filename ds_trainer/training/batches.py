"""Between datasets and the loop: loaders that follow the plan, and checks of what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.columns import base_model, forward_names, takes_any_name
from ds_trainer.data.lengths import (
    BalancedShareSampler,
    GroupedByLength,
    Lengths,
    RoughlySorted,
    SortedShareSampler,
    sample_lengths,
)
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.sampler import ShareSampler
from ds_trainer.data.stream import ShareOfStream, StreamLoader, is_stream, length_of
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def check_dataset(dataset: Any, name: str, plan: BatchPlan) -> None:
    """Refuse what is no data, and data known to be too little.

    Raises:
        ConfigError: names ``name`` and what is wrong.
    """
    if is_stream(dataset):
        return  # whether there is anything in it is seen when it is read
    if not hasattr(dataset, "__getitem__") or length_of(dataset) is None:
        raise ConfigError(
            f"{name}: a {type(dataset).__name__} has no length or no items. Data is needed: an object with __len__ and "
            "__getitem__, or one with __iter__."
        )
    if plan.rounds(len(dataset)) == 0:
        needed = f"; dataloader_drop_last leaves out rounds of less than {plan.round_size}" if plan.drop_last else ""
        raise ConfigError(f"{name} is empty: it has {len(dataset)} samples{needed}.")


def check_run_length(dataset: Any, args: TrainingArguments) -> None:
    """Refuse to train on data without length for a number of epochs.

    Raises:
        ConfigError: names what is missing.
    """
    if args.max_steps <= 0 and is_stream(dataset) and length_of(dataset) is None:
        raise ConfigError(_NO_LENGTH.format(f"train_dataset, a {type(dataset).__name__},", args.max_steps))


_NO_LENGTH = (
    "{0} has no length, so nobody can tell how many steps num_train_epochs is, and max_steps={1}. Set max_steps to the "
    "number of optimizer steps; the data is read again from its beginning as often as that takes."
)


class Sampling:
    """The order of training samples and their dealing: ``args.train_sampling_strategy``, ``sortish_sampler``.

    Args:
        args: what is asked for.
        dataset: the data with all its columns: one of them may be the samples' length.
        processing_class: names the model's first input, by which samples are measured that have no such column.
    """

    def __init__(self, args: TrainingArguments, dataset: Any, processing_class: Any = None) -> None:
        self.strategy = args.train_sampling_strategy
        self.seed: int = args.seed if args.data_seed is None else args.data_seed
        self._lengths: Lengths | None = None
        self._sortish = bool(getattr(args, "sortish_sampler", False))
        if not self._sortish and self.strategy not in (
            SamplingStrategy.GROUP_BY_LENGTH,
            SamplingStrategy.BATCH_REBALANCE,
        ):
            return
        asked_by = "sortish_sampler" if self._sortish else "train_sampling_strategy"
        if is_stream(dataset):
            logger.warning(
                "%s=%s is left out: a %s is read in its own order.",
                asked_by,
                getattr(args, asked_by),
                type(dataset).__name__,
            )
            return
        self._lengths = _lengths(args, dataset, processing_class, asked_by)

    def sampler(self, plan: BatchPlan, samples: int, dp_rank: int) -> ShareSampler:
        """The share of replica ``dp_rank``."""
        if self._lengths is not None and self.strategy == SamplingStrategy.BATCH_REBALANCE:
            return BalancedShareSampler(plan, self._lengths, dp_rank, self.seed)
        order = None
        if self._lengths is not None:
            kind = RoughlySorted if self._sortish else GroupedByLength
            order = kind(self._lengths, plan.step_size, self.seed)
        return ShareSampler(plan, samples, dp_rank, self.seed, self.strategy != SamplingStrategy.SEQUENTIAL, order)


def _lengths(args: TrainingArguments, dataset: Any, processing_class: Any, asked_by: str) -> Lengths:
    names = getattr(processing_class, "model_input_names", None)
    return sample_lengths(dataset, args.length_column_name, names[0] if names else "input_ids", asked_by)


def lengths_for_evaluation(args: TrainingArguments, dataset: Any, processing_class: Any = None) -> Lengths | None:
    """Lengths of samples that may be evaluated in their order; None where that is not asked for, or not possible.

    ``train_sampling_strategy=group_by_length`` asks for it, as in transformers. Lists of batches or of objects
    (``eval_do_concat_batches=False``, ``eval_use_gather_object``) stay in the dataset's order.
    """
    asked = args.train_sampling_strategy == SamplingStrategy.GROUP_BY_LENGTH
    if not asked or is_stream(dataset) or args.eval_use_gather_object or not args.eval_do_concat_batches:
        return None
    try:
        return _lengths(args, dataset, processing_class, "train_sampling_strategy")
    except ConfigError as error:
        logger.warning("Evaluation goes through the data in its own order: %s", error)
        return None


def planned_loader(
    dataset: Any,
    plan: BatchPlan,
    args: TrainingArguments,
    collate: Callable[[list[Any]], Any],
    sampling: Sampling | None = None,
    lengths: Lengths | None = None,
) -> PlannedLoader | StreamLoader:
    """The loader of this rank's replica; without ``sampling`` in the order of ``lengths``, or the dataset's."""
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
        share = ShareOfStream(dataset, plan, dp_rank, collate, 0 if sampling is None else sampling.seed)
        # Evaluation has no steps: there the ranks compare notes now and then.
        return StreamLoader(share, _EVAL_WINDOW if sampling is None else plan.accumulation, workers, pin, **options)
    if sampling is None and lengths is not None:
        sampler: ShareSampler = SortedShareSampler(plan, lengths, dp_rank)
    elif sampling is None:
        sampler = ShareSampler(plan, len(dataset), dp_rank, shuffle=False)
    else:
        sampler = sampling.sampler(plan, len(dataset), dp_rank)
    return PlannedLoader(dataset, sampler, collate, workers, pin, **options)


_EVAL_WINDOW = 8


def rounds_of(loader: Any) -> int | None:
    """Micro-batches of an epoch of ``loader``, the same number on all ranks; None where no rank knows it. Collective.

    Raises:
        ConfigError: ranks that would not run the same number of rounds, or none at all.
    """
    own = length_of(loader)
    rounds = [own] if distributed.alike(repr(own)) else distributed.gather_objects(own)
    if len(set(rounds)) > 1 or rounds[0] == 0:
        raise ConfigError(
            f"get_train_dataloader: the loaders' lengths over the ranks are {rounds}; all must be equal and positive "
            "(or unknown on all ranks)."
        )
    return None if own is None else int(own)


def tell_epoch(loader: Any, epoch: int) -> None:
    """``set_epoch(epoch)`` of a loader that is not ours, and of its samplers and dataset, where they have it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    told: list[Any] = []
    for part in [*parts, getattr(loader, "dataset", None)]:
        if callable(getattr(part, "set_epoch", None)) and not any(part is other for other in told):
            told.append(part)
            part.set_epoch(epoch)


def checked_batch(batch: Any) -> Mapping[str, Any]:
    """``batch`` if a model can be called with it by keyword.

    Raises:
        ConfigError: it is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"A batch is a {type(batch).__name__}, but models are called by keyword: let the data_collator return a "
            "dict like {'input_ids': ..., 'labels': ...}."
        )
    if not any(_holds_tensor(value) for value in batch.values()):
        kinds = ", ".join(f"{key}: {type(value).__name__}" for key, value in batch.items()) or "it is empty"
        raise ConfigError(
            f"A batch holds no tensor ({kinds}): let the data_collator make tensors, as torch.tensor(...) or a "
            "collator with return_tensors='pt' does."
        )
    return batch


def check_names(batch: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a batch with keys that ``model`` cannot be called with.

    Raises:
        ConfigError: names them, and what the model takes.
    """
    names = forward_names(model)
    unknown = [key for key in batch if key not in names]
    if not unknown or takes_any_name(model):
        return
    wanted = [name for name in names if name not in batch and "label" in name]
    hint = f"Rename '{unknown[0]}' to '{wanted[0]}'" if wanted and "label" in unknown[0] else "Leave it out"
    raise ConfigError(
        f"The batches have {', '.join(map(repr, unknown))}, which {type(base_model(model)).__name__}.forward does not "
        f"take; it takes {', '.join(names)}. {hint} in the dataset or in the data_collator."
    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_holds_tensor, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor)


def number_of_samples(inputs: Mapping[str, Any]) -> int:
    """Length of the first dimension of the first tensor in ``inputs``; 0 where there is none."""
    for value in inputs.values():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
    return 0


def on_device(value: Any, device: torch.device, float_type: torch.dtype | None = None) -> Any:
    """``value`` (tensors, also inside dicts, lists and tuples) on ``device``; copies from pinned memory do not wait.

    Args:
        value: a batch or a part of it; what is no tensor stays.
        device: where to.
        float_type: what floating-point tensors become; None leaves them.
    """
    if isinstance(value, torch.Tensor):
        dtype = float_type if value.is_floating_point() else None
        return value.to(device, dtype, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: on_device(part, device, float_type) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(part, device, float_type) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(part, device, float_type) for part in value)
    return value


def labels_in(inputs: Mapping[str, Any], label_names: Sequence[str]) -> str | None:
    """The first of ``label_names`` that the batch has."""
    return next((name for name in label_names if name in inputs), None)

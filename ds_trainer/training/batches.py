"""Between datasets and the loop: loaders that follow the plan, and checks of what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.sampler import ShareSampler
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError


def check_dataset(dataset: Any, name: str, plan: BatchPlan) -> None:
    """Refuse data that has no length, no items, or not enough of them.

    Raises:
        ConfigError: names ``name`` and what is wrong.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"{name}: a {type(dataset).__name__} has no length or no items. Map-style data is needed, an object with "
            "__len__ and __getitem__."
        )
    if plan.rounds(len(dataset)) == 0:
        needed = f"; dataloader_drop_last leaves out rounds of less than {plan.round_size}" if plan.drop_last else ""
        raise ConfigError(f"{name} is empty: it has {len(dataset)} samples{needed}.")


def planned_loader(
    dataset: Any,
    plan: BatchPlan,
    args: TrainingArguments,
    collate: Callable[[list[Any]], Any],
    *,
    seed: int,
    shuffle: bool,
) -> PlannedLoader:
    """The loader of this rank's replica."""
    dp_rank = plan.layout.coordinates(distributed.rank()).dp
    sampler = ShareSampler(plan, len(dataset), dp_rank, seed, shuffle)
    pin = args.dataloader_pin_memory and args.device_type == "cuda"
    options: dict[str, Any] = {}
    if args.dataloader_num_workers > 0:
        options = {
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }
    return PlannedLoader(dataset, sampler, collate, args.dataloader_num_workers, pin, **options)


def rounds_of(loader: Any) -> int:
    """Micro-batches of an epoch of ``loader``; the same number on all ranks. Collective.

    Raises:
        ConfigError: a loader without length, or ranks that would not run the same number of rounds.
    """
    rounds = distributed.gather_objects(len(loader) if hasattr(loader, "__len__") else None)
    if None in rounds or len(set(rounds)) > 1 or rounds[0] == 0:
        raise ConfigError(
            f"get_train_dataloader: the loaders' lengths over the ranks are {rounds}; all must be known, equal and "
            "positive."
        )
    return int(rounds[0])


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
    return batch


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

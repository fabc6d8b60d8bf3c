"""Measures what the loss of a micro-batch is: a mean over samples, over items, over something else, a sum, or neither.

A few samples of a batch are computed together and in parts, in two ways, without dropout and without gradients. With
the losses ``l_p`` of the parts and their counts ``c_p``, a mean over what ``c`` counts is ``sum_p c_p l_p / sum_p c_p``
for all samples together; a sum is ``sum_p l_p``. Candidates for which this does not hold are rejected; of
the others, the first one is right, or nothing that the batch contains can tell it from the right one.

A loss for which none holds depends on how samples are grouped (a contrastive loss, weights of classes, terms with
different means). It is weighted by the nearest of items and samples, and one sentence says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ds_trainer.data.batch_structure import Dummy, number_of_samples
from ds_trainer.data.columns import base_model
from ds_trainer.training.loop.batch_splitting import NotSplittable, samples_of_batch
from ds_trainer.training.loop.batches import labels_in
from ds_trainer.training.loop.device_copies import on_device
from ds_trainer.training.loop.loss_rule import ItemCounter, Weighting
from ds_trainer.training.loop.loss_unit import SAMPLES, units_of
from ds_trainer.utils import distributed
from ds_trainer.utils.logging import CHECK, get_logger
from ds_trainer.utils.row_random import SameForRows
from ds_trainer.utils.seeds import random_state, restore_random_state
from ds_trainer.utils.undisturbed import train_but_for_statistics, undisturbed

logger = get_logger(__name__)

_READ = 16  # samples of a dataset that are looked at to find two that differ
_SMALLEST = 1e-6  # a loss below is taken as 0
_SPLITS: Mapping[int, tuple[tuple[list[int], list[int]], ...]] = {
    2: (([0], [1]),),
    3: (([0], [1, 2]), ([0, 1], [2])),
    4: (([0, 1], [2, 3]), ([0, 2], [1, 3])),
}
"""By the number of samples: two ways to cut them in two parts. Pairs, where possible: some losses need two samples."""


class _Found(NamedTuple):
    """The losses of one rank: of all samples, and of the parts with their counts by candidate."""

    whole: float
    parts: list[tuple[list[float], list[list[float]]]]


def measured_weighting(
    loss_of: Callable[[Any], torch.Tensor | None],
    model: nn.Module,
    batch: Any,
    items: ItemCounter,
    more: Callable[[], Any] | None = None,
) -> Weighting:
    """Measure how losses of micro-batches make the loss of all of them. The same on all ranks. Collective.

    Runs five or ten forward passes of at most four samples, twice if one fails; afterwards model and random generators
    are as before.

    Args:
        loss_of: the loss of some samples of a batch, as user code gets them. Collective if the model's forward is.
        model: the model or its engine, which is put in evaluation mode meanwhile.
        batch: a micro-batch of this rank; that of the main process is measured.
        items: counts the items of a batch, the first candidate.
        more: reads a batch of two samples that differ, for a ``batch`` that cannot tell; None if there is no dataset.
    """
    with undisturbed(model):
        if more is not None and distributed.rank() == 0 and not _can_tell(batch, items):
            try:
                batch = more() or batch
            except Exception as problem:  # samples of the data set that no batch has together may not fit into one
                logger.debug("Two samples of the data set make no batch: %s", problem)
        # All ranks compute the same samples: their passes communicate alike, and fail alike, under ZeRO-3 too.
        device = _device_of(batch)
        whole, reason = distributed.broadcast_object(_most_different(batch, items) if distributed.rank() == 0 else None)
        whole = on_device(whole, device)
        known, own = units_of(whole, items.label_names, getattr(base_model(model), "config", None))
        units: list[Any] = [*known, items, SAMPLES, *own]
        parts = [] if whole is None else _parts_of(whole)
        found, error, draws = None, "", False
        if parts:
            found, error, draws = _run(loss_of, whole, parts, units)
            if distributed.agree(torch.tensor([int(bool(error))]))[0]:  # some models have a loss in training mode only
                train_but_for_statistics(model)
                found, error, draws = _run(loss_of, whole, parts, units)
    residuals = [_residual(found, index) for index in range(len(units))] if found else [-1.0] * len(units)
    residuals.append(_residual(found, None) if found else -1.0)  # of a sum
    votes = distributed.largest(torch.tensor([*residuals, float(bool(error)), float(draws)], dtype=torch.float64))
    *residuals, failed, drawn = votes.tolist()
    bound = _tolerance(model)
    # A candidate that rounding explains still loses to one that fits far better.
    bound = min(bound, max(bound / 20, 10 * min(residuals)))
    fits = [index for index, residual in enumerate(residuals) if residual <= bound]
    name = type(base_model(model)).__name__
    log = logger.info if distributed.rank() == 0 else logger.debug
    nearest: Any = min((items, SAMPLES), key=lambda unit: residuals[units.index(unit)])
    if max(residuals) < 0 or failed or (drawn and not fits):
        drawing = "it draws random numbers with NumPy or Python" if drawn else "no batch has two samples that can tell"
        reason = error or reason or ("an error on another rank" if failed else drawing)
        log("It could not be measured what the loss of %s is the mean of: %s. It counts by items.", name, reason)
        return Weighting(items, settled=True)
    if not fits:
        if distributed.rank() == 0:
            weights = "labels" if nearest is items and _has_tokens(whole, items) else "samples"
            logger.warning(_NOT_ADDITIVE, name, _numbers(found), weights)
        return Weighting(nearest, additive=False, settled=True)
    if fits[0] == len(units):
        log("The loss of %s is a sum: the losses of micro-batches are added up.", name, extra={CHECK: "loss"})
        return Weighting(items, summed=True, settled=True)
    different = any(_differ(found, fits[0], index) for index in fits[1:] if index < len(units))
    both = {units.index(items), units.index(SAMPLES)} <= set(fits)
    ambiguous = distributed.agree(torch.tensor([int(different or (both and _has_tokens(whole, items)))]))[0]
    if units[fits[0]] is not items:
        text = "The loss of %s is a mean over %s: micro-batches are weighted by their number."
        log(text, name, units[fits[0]], extra={CHECK: "loss"})
    return Weighting(units[fits[0]], settled=not ambiguous)


_NOT_ADDITIVE = (
    "The loss of %s for some samples does not follow from the losses of parts of them%s: loss, gradient and eval_loss "
    "depend on which samples share a micro-batch (per_device_train_batch_size, per_device_eval_batch_size; these are "
    "weighted by their %s), so keep these sizes when ranks or accumulation change, or return a sum divided by "
    "num_items_in_batch."
)


def two_samples(loader: Any, items: ItemCounter) -> Any:
    """A batch of two samples of a loader's dataset, with different items or labels if there are such; None if not.

    They are collated as those of the loader are. No loader but one with an indexed dataset can give them.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    found: list[tuple[tuple[float, float], Any]] = []
    for index in range(min(_READ, len(dataset))):
        sample = dataset[index]
        batch = loader.collate_fn([sample])
        if not isinstance(batch, Mapping) or number_of_samples(batch) != 1:
            return None
        found.append((_keys(batch, items)[0], sample))
        if found[-1][0][0] != found[0][0][0]:
            break
    found.sort(key=lambda pair: pair[0])
    return loader.collate_fn([found[0][1], found[-1][1]]) if len(found) > 1 else None


def _can_tell(batch: Any, items: ItemCounter) -> bool:
    """Whether a batch has two samples, with different numbers of items if these are tokens."""
    if not isinstance(batch, Mapping) or isinstance(batch, Dummy) or number_of_samples(batch) < 2:
        return False
    return not _has_tokens(batch, items) or len({count for count, _ in _keys(batch, items)}) > 1


def _has_tokens(batch: Any, items: ItemCounter) -> bool:
    """Whether the labels may have another number of items in each sample."""
    labels = batch.get(labels_in(batch, items.label_names) or "") if isinstance(batch, Mapping) else None
    return isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point()


def _keys(batch: Any, items: ItemCounter) -> list[tuple[float, float]]:
    """For each sample, its items and the sum of its labels. Waits for the device."""
    counts = items.rows(batch).tolist()
    labels = batch.get(labels_in(batch, items.label_names) or "")
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0 or len(labels) != len(counts):
        return [(count, 0.0) for count in counts]
    sums = labels.double().flatten(1).sum(1) if labels.dim() > 1 else labels.double()
    return list(zip(counts, sums.tolist(), strict=True))


def _run(
    loss_of: Callable[[Any], torch.Tensor | None], whole: Any, parts: list[tuple[Any, Any]], units: list[Any]
) -> tuple[_Found | None, str, bool]:
    """The losses of this rank (None if it cannot compare any), what went wrong, and whether Python or NumPy drew."""
    passes = [whole, *(part for pair in parts for part in pair)]
    start = random_state()
    losses, error, end = _losses(loss_of, passes, start)
    changed = torch.tensor([int(not torch.equal(start["torch"], end["torch"]) or not _same_cuda(start, end))])
    draws = start["python"] != end["python"] or not np.array_equal(start["numpy"][1], end["numpy"][1])
    draws = draws or start["numpy"][2] != end["numpy"][2]
    if distributed.agree(changed)[0]:
        losses, error, _ = _losses(loss_of, passes, start, same_for_rows=True)
    if error:
        return None, error, draws
    counts = [[[float(unit.rows(part).sum()) for part in pair] for unit in units] for pair in parts]
    found = [(losses[1 + 2 * index : 3 + 2 * index], pair) for index, pair in enumerate(counts)]
    return _Found(losses[0], found), "", draws


def _most_different(batch: Any, items: ItemCounter) -> tuple[Any, str]:
    """The samples of ``batch`` that differ most, at most four, in host memory; or None and why there are none."""
    if not isinstance(batch, Mapping) or isinstance(batch, Dummy) or number_of_samples(batch) < 2:
        return None, ""
    keys = _keys(batch, items)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    try:
        chosen = samples_of_batch(batch, order if len(order) <= 4 else [*order[:2], *order[-2:]])
    except NotSplittable as problem:
        return None, str(problem)
    return on_device(chosen, torch.device("cpu")), ""


def _parts_of(whole: Any) -> list[tuple[Any, Any]]:
    splits = _SPLITS[number_of_samples(whole)]
    return [(samples_of_batch(whole, one), samples_of_batch(whole, two)) for one, two in splits]


def _device_of(batch: Any) -> torch.device:
    values = batch.values() if isinstance(batch, Mapping) else ()
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))


def _losses(
    loss_of: Callable[[Any], torch.Tensor | None], passes: list[Any], start: dict[str, Any], same_for_rows: bool = False
) -> tuple[list[float], str, dict[str, Any]]:
    """The loss of each batch with the same random numbers, the first error, and the random state after the first."""
    losses, error, end = [], "", start
    for index, batch in enumerate(passes):
        restore_random_state(start)
        try:
            with SameForRows() if same_for_rows else nullcontext():
                loss = loss_of(batch)
            losses.append(float("nan") if loss is None else float(loss.detach().mean()))
        except Exception as problem:  # a loss may need more samples than a part has; the real pass comes later
            losses.append(float("nan"))
            error = error or f"{type(problem).__name__}: {problem}".split("\n")[0].rstrip(".")
        end = random_state() if index == 0 else end
    return losses, error, end


def _same_cuda(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one["cuda"] is None or torch.equal(one["cuda"], two["cuda"])


def _residual(found: _Found, unit: int | None) -> float:
    """How far the loss of all samples is from the mean of the parts, or their sum: relative, -1 if nothing can tell."""
    worst = -1.0
    for losses, counts in found.parts:
        scale = max(abs(loss) for loss in (found.whole, *losses) if loss == loss) if found.whole == found.whole else 0.0
        if not _SMALLEST < scale < float("inf"):
            continue
        if unit is None:
            mean = sum(losses)
        else:
            weights = counts[unit]
            total = sum(weights)
            added = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)
            mean = added / total if total else float("nan")
        worst = max(worst, abs(mean - found.whole) / scale if mean - mean == 0 else float("inf"))
    return worst


def _tolerance(model: nn.Module) -> float:
    """The relative difference that rounding explains, in the precision of ``model``."""
    autocast = getattr(model, "torch_autocast_enabled", None)
    kinds = {parameter.dtype for parameter in model.parameters()}
    if {torch.bfloat16, torch.float16} & kinds or torch.is_autocast_enabled() or (autocast is not None and autocast()):
        return 3e-3
    return 2e-5 if all(parameter.device.type == "cpu" for parameter in model.parameters()) else 2e-4


def _differ(found: _Found | None, one: int, other: int) -> bool:
    """Whether two candidates weight the parts differently, so that one of them is wrong."""
    for _, counts in () if found is None else found.parts:
        first, second = (counts[index][0] / (sum(counts[index]) or 1.0) for index in (one, other))
        if abs(first - second) > _SMALLEST:
            return True
    return False


def _numbers(found: _Found | None) -> str:
    if found is None:
        return ""
    (one, two), _ = found.parts[0]
    return f" ({found.whole:.4g}; parts {one:.4g} and {two:.4g})"

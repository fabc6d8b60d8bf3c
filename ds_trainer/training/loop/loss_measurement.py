"""Measures what the loss of a micro-batch is: a mean over samples, over items, over something else, a sum, or neither.

A few samples of a batch are computed together and in parts, in one or two ways, without gradients, unless the loss
itself takes one. With
the losses ``l_p`` of the parts and their counts ``c_p``, a mean over what ``c`` counts is ``sum_p c_p l_p / sum_p c_p``
for all samples together; a sum is ``sum_p l_p``. Candidates for which this does not hold are rejected; of
the others, the first one is right, or nothing that the batch contains can tell it from the right one.

A loss for which none holds depends on how samples are grouped (a contrastive loss, weights of classes, terms with
different means). It is weighted by the nearest of items and samples, and one sentence says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ds_trainer.data.batch_structure import Dummy, number_of_samples
from ds_trainer.data.columns import base_model
from ds_trainer.training.loop.batch_splitting import NotSplittable, samples_of_batch
from ds_trainer.training.loop.batches import labels_in
from ds_trainer.training.loop.device_copies import on_device
from ds_trainer.training.loop.loss_passes import PAIRS, LossPasses
from ds_trainer.training.loop.loss_rule import ItemCounter, Weighting
from ds_trainer.training.loop.loss_unit import SAMPLES, Unit, units_of
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import CHECK, get_logger
from ds_trainer.utils.plain_attributes import plain_attributes_restored
from ds_trainer.utils.undisturbed import undisturbed

if TYPE_CHECKING:
    from ds_trainer.training.loop.loss_computation import LossComputation

logger = get_logger(__name__)

_READ = 16  # samples of a dataset that are looked at to find two that differ
ENOUGH = 4  # samples; a loss of pairs or triplets is often the mean of those of two single ones


@dataclass(frozen=True)
class LossMeasurement:
    """Passes that measure what the losses of micro-batches make. All methods are collective.

    Attributes:
        loss_of: the loss of some samples of a batch, as user code gets them. Collective if the model's forward is.
        model: the model or its engine.
        batch: a micro-batch of this rank; that of the first rank whose samples can tell is measured.
        items: counts the items of a batch, the first candidate.
        owners: what ``loss_of`` keeps here is as before afterwards.
        replica: index of this rank's replica.
        more: reads a batch of two or four samples, if no ``batch`` can tell; None if there is no dataset.
        training: whether the losses are those of a training: the model is in training mode, but for dropout modules and
            statistics of batches. Otherwise it is in evaluation mode.
        shards: shards the sequences of a ``batch``, which is in host memory; None without sequence sharding.
    """

    loss_of: Callable[[Any], torch.Tensor | None]
    model: nn.Module
    batch: Any
    items: ItemCounter
    owners: Sequence[Any] = ()
    replica: int = 0
    more: Callable[[], Any] | None = None
    training: bool = False
    shards: LossComputation | None = None

    def weighting(self, kept: Mapping[str, Any] | None = None) -> Weighting:
        """Measure how losses of micro-batches make the loss of all of them. The same on all ranks.

        Runs three to seven forward passes of at most four samples; as many in the other mode if one fails, or draws
        random numbers that cannot be repeated. Afterwards model and random generators are as before.

        Args:
            kept: :meth:`Weighting.to_json` of a checkpoint, which counts as long as the losses agree with it.

        Raises:
            ConfigError: the loss of a sequence does not follow from the losses of its shards.
        """
        items, name = self.items, type(base_model(self.model)).__name__
        before = None if kept is None else weighting_from(kept, items)
        with undisturbed(self.model), plain_attributes_restored(*self.owners):
            whole, reason = self._samples()
            first, own = units_of(whole, items.label_names, getattr(base_model(self.model), "config", None))
            units: list[Any] = [*([] if before is None else [before.count]), *first, items, SAMPLES, *own]
            found = self._found(whole, units)
            fails = found is not None and not found.fits and found.among_ranks is None
            if fails and self.shards is None and (pairs := _pairs(self.batch, items)) is not None:
                of_pairs = self._passes(pairs, units, self.training, splits=PAIRS)
                if of_pairs.fits[:1] not in ([], [len(units)]) or of_pairs.among_ranks is not None:
                    found = of_pairs
        if found is not None and found.random and distributed.rank() == 0:
            logger.info(_DRAWS, name, extra={CHECK: "loss"})
        verdict = _verdict(name, found, units, items, reason, before)
        # Of a loss that is not additive, an evaluation would say the same again.
        return replace(verdict, for_evaluation=found is None or found.for_evaluation or not verdict.additive)

    def not_a_sum(self) -> str:
        """Why a loss of a script that is divided by the item count of the step is not the sum of those of its parts.

        Empty if it is, or if it cannot be measured.

        Raises:
            ConfigError: the loss of a sequence is not the sum of the losses of its shards.
        """
        with undisturbed(self.model), plain_attributes_restored(*self.owners):
            found = self._found(self._samples()[0], [])
        if found is None or found.error or max(found.residuals) < 0:
            return ""
        if found.drew and not (found.fits or found.repeats):
            return ""
        name = type(base_model(self.model)).__name__
        if found.among_ranks is not None:
            return _AMONG_RANKS % (name, *found.among_ranks)
        if not found.fits:
            return _NOT_DIVIDED % (name, found.numbers())
        if found.fit_shards == []:
            raise ConfigError(_NOT_A_SUM_OF_SHARDS.format(name, *found.whole_and_shards))
        return ""

    def _samples(self) -> tuple[Any, str]:
        """The samples to measure, the same on all ranks, and why there are none. Collective.

        All compute the same: their passes communicate alike, and fail alike, under ZeRO-3 too.
        """
        batch, items, more = self.batch, self.items, self.more
        world, rank = distributed.world_size(), distributed.rank()
        tells = _can_tell(batch, items)
        votes = [tells and (_has_tokens(batch, items) or number_of_samples(batch) >= ENOUGH), tells]
        best, first = distributed.agree(torch.tensor([(world - rank) * vote for vote in votes]))
        source = world - (best or first or world)
        if more is not None and not best:
            found = None
            try:
                found = more() if rank == 0 else None
            except Exception as problem:  # samples of the data set that no batch has together may not fit into one
                logger.debug("Samples of the data set make no batch: %s", problem)
            if distributed.agree(torch.tensor([int(found is not None)]))[0]:
                source, batch = 0, batch if found is None else found
        chosen, reason = distributed.broadcast_object(
            _most_different(batch, items, 2 if self.shards is None else 1) if rank == source else None, source
        )
        return on_device(chosen, _device_of(batch)), reason

    def _passes(self, whole: Any, units: list[Any], training: bool, **more: Any) -> LossPasses:
        return LossPasses(self.loss_of, self.model, whole, units, training, replica=self.replica, **more).run()

    def _found(self, whole: Any, units: list[Any]) -> LossPasses | None:
        """The passes in the mode that tells; None without samples."""
        found = None
        for mode in (self.training, not self.training) if whole is not None else ():
            found = self._passes(whole, units, mode, shards=self.shards)
            if found.short and (samples := number_of_samples(whole)) > 2:
                whole = samples_of_batch(whole, [0, samples - 1])
                found = self._passes(whole, units, mode, shards=self.shards)
            if not found.error and (found.fits or not found.drew or found.repeats):
                break
        return found


def _pairs(batch: Any, items: ItemCounter) -> Any:
    """Two samples of two rows each, the same on all ranks; None if no batch can be of pairs. Collective.

    Preference losses get the rows of all chosen answers before those of all rejected ones, and no labels.
    """
    unlabeled = isinstance(batch, Mapping) and labels_in(batch, items.label_names) is None
    rows = number_of_samples(batch) if unlabeled and not isinstance(batch, Dummy) else 0
    world, rank = distributed.world_size(), distributed.rank()
    [first] = distributed.agree(torch.tensor([world - rank if rows >= 4 and rows % 2 == 0 else 0]))
    chosen = None
    if first == world - rank:
        half = rows // 2
        try:
            chosen = on_device(samples_of_batch(batch, [0, half - 1, half, rows - 1]), torch.device("cpu"))
        except NotSplittable:
            chosen = None
    chosen = distributed.broadcast_object(chosen, world - first) if first else None
    return None if chosen is None else on_device(chosen, _device_of(batch))


def _verdict(
    name: str, found: LossPasses | None, units: list[Any], items: ItemCounter, reason: str, before: Weighting | None
) -> Weighting:
    """What the losses of model ``name`` say; logs it on the main process."""
    log = logger.info if distributed.rank() == 0 else logger.debug
    warn = logger.warning if distributed.rank() == 0 else logger.debug
    if found is None or found.error or max(found.residuals) < 0 or (found.foreign and not found.fits):
        zero = found is not None and not found.error and max(found.residuals) < 0
        if found is None:
            reason = reason or "no batch has two samples that can tell"
        else:
            drawn = "it draws random numbers with NumPy or Python"
            reason = found.error or ("its losses are 0 for so few samples" if zero else drawn)
        counted = before or Weighting(items, settled=not zero and not (found and found.short))
        log(_UNKNOWN, name, reason, "as in the checkpoint" if before else "by items")
        return counted
    fits, total = found.fits, len(units)
    if found.fit_shards is not None and fits:
        fits = found.fits = [index for index in fits if index in found.fit_shards]
        if not fits:
            whole, *by_shards = found.whole_and_shards
            by_items, added = by_shards[units.index(items)], by_shards[total]
            raise ConfigError(_NOT_OF_SHARDS.format(name, whole, by_items, added))
    if before is not None:
        before = replace(before, of_shards=0 in found.of_shards or found.fit_shards is None)
    if found.among_ranks is not None:
        if before is None or before.additive:
            warn(_AMONG_RANKS, name, *found.among_ranks)
        return replace(before or Weighting(items, settled=True), additive=False, among_ranks=True)
    if before is not None:
        if (not fits) if not before.additive else (total if before.summed else 0) in fits:
            return before
        warn(_CHANGED, name, "a sum" if before.summed else f"weighted by {before.count}", found.numbers())
    if not fits:
        places = {units.index(items): "labels" if _has_tokens(found.whole, items) else "samples", total: "sum"}
        places = {units.index(SAMPLES): "samples", **places}
        # To add up what is no sum multiplies the gradient, so it must be far nearer.
        nearest = min(places, key=lambda index: found.residuals[index] * (20 if index == total else 1))
        how = "these are added up" if nearest == total else f"these are weighted by their {places[nearest]}"
        if found.fit_shards is not None:
            how += ", and which tokens of a sequence a rank has"
        warn(_NOT_ADDITIVE, name, found.numbers(), how)
        if nearest == total:
            return Weighting(items, summed=True, additive=False, settled=True)
        return Weighting(units[nearest], additive=False, settled=True, of_shards=units[nearest] is not SAMPLES)
    if fits[0] == total:
        log("The loss of %s is a sum: the losses of micro-batches are added up.", name, extra={CHECK: "loss"})
        return Weighting(items, summed=True, settled=True)
    both = {units.index(items), units.index(SAMPLES)} <= set(fits)
    tokens = _has_tokens(found.whole, items)
    few = not tokens and number_of_samples(found.whole) < ENOUGH  # may be the mean of single ones by chance
    ambiguous = found.is_ambiguous() or (both and tokens) or few or (found.alike and not tokens)
    if units[fits[0]] is not items:
        text = "The loss of %s is a mean over %s: micro-batches are weighted by their number."
        log(text, name, units[fits[0]], extra={CHECK: "loss"})
    of_shards = fits[0] in found.of_shards or found.fit_shards is None
    return Weighting(units[fits[0]], settled=not ambiguous, of_shards=of_shards)


def weighting_from(kept: Mapping[str, Any], items: ItemCounter) -> Weighting:
    """The weighting that :meth:`Weighting.to_json` wrote."""
    unit = items if kept["unit"] is None else Unit(**kept["unit"])
    of_shards = isinstance(unit, ItemCounter) or bool(unit.key)
    return Weighting(unit, bool(kept["summed"]), bool(kept["additive"]), settled=True, of_shards=of_shards)


_UNKNOWN = "It could not be measured what the loss of %s is the mean of: %s. It counts %s."
_CHANGED = (
    "The loss of %s is not what it was when the checkpoint was written (%s)%s. It is weighted as it is now; if the "
    "code of the loss is the same, compare the batches."
)
_DRAWS = (
    "The loss of %s depends on random numbers that it draws (masks, negatives, noise): each rank and micro-batch draws "
    "its own, so losses of different numbers of ranks or accumulation agree on average only, even with the same seed."
)
_NOT_OF_SHARDS = (
    "The loss of {} for whole sequences, {:.4g}, does not follow from its losses for their shards: these give {:.4g} "
    "as a mean over items, {:.4g} as a sum. With context_parallel_size or sequence_parallel_size above 1 each rank has "
    "a part of each sequence: compare its logits with shift_labels, which are not to be shifted again, and return the "
    "mean over all targets, or their sum divided by num_items_in_batch; or set both sizes to 1."
)
_NOT_A_SUM_OF_SHARDS = (
    "The loss of {} for whole sequences, {:.4g}, is not the sum of its losses for their shards, {:.4g}, although it "
    "takes num_items_in_batch. With context_parallel_size or sequence_parallel_size above 1 each rank has a part of "
    "each sequence: compare its logits with shift_labels, which are not to be shifted again, and divide the sum over "
    "its targets by num_items_in_batch; or set both sizes to 1."
)
_NOT_DIVIDED = (
    "The loss of %s takes num_items_in_batch, but for some samples it is not the sum of the losses of parts of them%s: "
    "loss and gradient depend on which samples share a micro-batch and on the number of ranks. Return the sum over the "
    "items of the micro-batch divided by num_items_in_batch, or do not take num_items_in_batch: what the loss is the "
    "mean of is measured then."
)
_AMONG_RANKS = (
    "The loss of %s depends on the samples of other ranks, with which it communicates (%.4g; with other samples there "
    "%.4g): loss, gradient and eval_loss depend on the number of ranks and on which samples they have together, so "
    "keep the ranks, per_device_train_batch_size and per_device_eval_batch_size. Where ranks have different numbers of "
    "samples, those of the smaller batch are repeated."
)
_NOT_ADDITIVE = (
    "The loss of %s for some samples does not follow from the losses of parts of them%s: loss, gradient and eval_loss "
    "depend on which samples share a micro-batch (per_device_train_batch_size, per_device_eval_batch_size; "
    "%s), so keep these sizes when ranks or accumulation change, or return a sum divided by "
    "num_items_in_batch."
)


def few_samples(loader: Any, items: ItemCounter) -> Any:
    """A batch of samples of a loader's dataset: two of tokens, with different items if there are such, or four.

    None if it has not so many. They are collated as those of the loader are. No loader but one with an indexed dataset
    can give them.
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
        tokens = _has_tokens(batch, items)
        if found[-1][0][0] != found[0][0][0] if tokens else len({key for key, _ in found[ENOUGH - 2 :]}) > 1:
            break
    found.sort(key=lambda pair: pair[0])
    if len(found) < 2:
        return None
    picked = [found[0], found[-1]] if tokens or len(found) < ENOUGH else [*found[:2], *found[-2:]]
    return loader.collate_fn([sample for _, sample in picked])


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


def _most_different(batch: Any, items: ItemCounter, least: int) -> tuple[Any, str]:
    """The samples of ``batch`` that differ most, at most four, in host memory; or None and why there are none."""
    if not isinstance(batch, Mapping) or isinstance(batch, Dummy) or number_of_samples(batch) < least:
        return None, ""
    if number_of_samples(batch) == 1:
        return on_device(batch, torch.device("cpu")), ""
    keys = _keys(batch, items)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    try:
        chosen = samples_of_batch(batch, order if len(order) <= 4 else [*order[:2], *order[-2:]])
    except NotSplittable as problem:
        return None, str(problem)
    return on_device(chosen, torch.device("cpu")), ""


def _device_of(batch: Any) -> torch.device:
    values = batch.values() if isinstance(batch, Mapping) else ()
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))

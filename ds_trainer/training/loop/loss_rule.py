"""The loss rule: the gradient is a sum over items divided by the items of the whole global batch.

An *item* is one term of the loss: a predicted token if labels are token ids, otherwise a sample. With the loss ``l_i``
of item ``i`` and the number ``N`` of items of all micro-batches of all replicas in one optimizer step, the loss of the
step is ``sum_i l_i / N``, for any layout, accumulation and padding.

There are two kinds of losses:

* *normalized*: the model (or ``compute_loss``) takes ``num_items_in_batch = N`` and returns its own sum divided by
  ``N``, as Hugging Face models do. It needs no change.
* *mean*: the model returns a mean over its micro-batch. What it is the mean of is measured
  (:mod:`ds_trainer.training.loop.loss_measurement`). With ``n`` of these in the micro-batch and ``N`` in the global
  batch, it is weighted by ``n / N``, which gives the mean over the global batch.

A model that adds an auxiliary loss is called with ``n`` instead of ``N``, and its loss is weighted by ``n / N``
(:mod:`ds_trainer.training.loop.auxiliary_loss`).

The first batch verifies the kind of the loss: a model may accept the argument and ignore it, and then the gradient
would be too large without any error.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_trainer.data.batch_structure import Dummy, number_of_samples
from ds_trainer.data.sequence_sharding import (
    IGNORED as IGNORED,  # as in torch's cross-entropy and Hugging Face's collators
)
from ds_trainer.training.loop.auxiliary_loss import adds_auxiliary_loss
from ds_trainer.training.loop.item_count import ItemCount
from ds_trainer.training.model.label_shift import shifts_labels
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.training.loop.router_balance import RouterBalance

logger = get_logger(__name__)

_GRAPH_NODES_LOOKED_AT = 200


def accepts_item_count(function: Callable[..., Any]) -> bool:
    """Whether ``function`` can be called with ``num_items_in_batch``."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or "num_items_in_batch" in parameters


class ItemCounter:
    """Counts the items of a micro-batch.

    Args:
        label_names: keys of the batch that may have labels; the first one present is used.
        shifted: whether the model shifts labels itself (:func:`shifts_labels`).
    """

    def __init__(self, label_names: Sequence[str], shifted: bool) -> None:
        self.label_names = tuple(label_names)
        self.shifted = shifted

    def __call__(self, inputs: Mapping[str, Any], by_sample: bool = False) -> torch.Tensor:
        """Number of items as an int64 scalar, on the device of the labels. Does not wait for the device.

        Samples count in a batch that is no mapping, which a subclass converts in ``_prepare_inputs``.

        Integer labels of two or more dimensions are token ids: all labels other than -100 count, except the first one
        of a row if the model shifts labels. Integer labels of one dimension count if they are not -100. With float
        labels or no labels, samples count.

        Args:
            inputs: a batch.
            by_sample: return the items of each sample instead: ``[samples]``.
        """
        if isinstance(inputs, Dummy):
            return torch.zeros((), dtype=torch.int64)
        if not isinstance(inputs, Mapping):
            return torch.tensor(number_of_samples(inputs))
        labels = inputs.get("shift_labels")
        shifted = self.shifted and labels is None
        if labels is None:
            for name in self.label_names:
                if name in inputs:
                    labels = inputs[name]
                    break
        if not isinstance(labels, torch.Tensor) or labels.dim() == 0 or labels.is_floating_point():
            samples = number_of_samples(inputs)
            return torch.ones(samples, dtype=torch.int64) if by_sample else torch.tensor(samples)
        targets = labels[..., 1:] if shifted and labels.dim() > 1 else labels
        if by_sample and targets.dim() > 1:
            return targets.ne(IGNORED).flatten(1).sum(1)
        return targets.ne(IGNORED).long() if by_sample else targets.ne(IGNORED).sum()

    def rows(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The items of each sample of a mapping: float64 ``[samples]``."""
        return self(inputs, by_sample=True).double()

    def __str__(self) -> str:
        return "items"


def depends_on(loss: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether ``loss`` depends on ``leaf`` in the last operations of its graph (a bounded search)."""
    queue: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while queue and len(seen) < _GRAPH_NODES_LOOKED_AT:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is leaf:
            return True
        queue += [parent for parent, _ in node.next_functions]
    return False


def loss_in(outputs: Any, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss in the outputs of a model: the entry ``"loss"``, the first element, or the output itself.

    Raises:
        ConfigError: it is not a scalar.
    """
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        loss = outputs[0] if outputs else None
    else:
        loss = getattr(outputs, "loss", outputs)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        what = f"only {', '.join(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        core = getattr(model, "module", model)  # name the user's model, not the engine
        raise ConfigError(
            f"{type(core).__name__} returned no scalar loss for a batch of {', '.join(inputs)}; it returned {what}. "
            "Add labels to the batch, pass a compute_loss_func, or override compute_loss."
        )
    return loss


@dataclass
class Weighting:
    """How the losses of micro-batches that are no sums over ``num_items_in_batch`` make the loss of all of them.

    Attributes:
        count: what each loss is the mean of, counted in a micro-batch: its weight.
        summed: the losses are sums; they are added up.
        additive: whether the loss of all follows from them.
        settled: whether that is measured (:mod:`ds_trainer.training.loop.loss_measurement`).
        for_evaluation: whether it is known to hold in evaluation mode too.
        of_shards: whether the counts of the shards of a sequence add up to that of the sequence. Those of samples do
            not: each shard has all.
        among_ranks: whether a loss depends on the samples of other ranks, which have to have as many.
    """

    count: Callable[[Any], torch.Tensor]
    summed: bool = False
    additive: bool = True
    settled: bool = False
    for_evaluation: bool = True
    of_shards: bool = True
    among_ranks: bool = False

    def to_json(self) -> dict[str, Any] | None:
        """For a checkpoint; None if it is not measured."""
        unit = asdict(self.count) if is_dataclass(self.count) and not isinstance(self.count, type) else None
        return {"unit": unit, "summed": self.summed, "additive": self.additive} if self.settled else None


class LossRule:
    """Turns the loss of one micro-batch into its contribution to the loss of the global batch.

    Args:
        count: counts the items of a micro-batch.
        normalized: whether the loss is assumed to be a sum divided by ``num_items_in_batch``.
        auxiliary: whether the model may add terms that are not a sum over items.
        claimed: whether the model, or the user, says that it is; otherwise it only takes any keyword argument.
        balance: the load-balancing loss of routers over ranks; None where each rank computes it alone.

    Attributes:
        weighting: how losses make the loss of the global batch if they do not use the count.
        weight: what a micro-batch counts in the global batch: its items, or that weight if the loss does not use them.
        evaluation: the same for the losses of evaluations; None: not measured.
        kept: the weighting of the checkpoint that the run resumes from (:meth:`Weighting.to_json`).
        verified: whether nothing is left to find out on the first batch.
        replicas: set by :meth:`declare` if the losses of the step add up to a mean on each replica; their number.
        scale: the factor by which ``compute_loss`` multiplies its result because transformers averages over ranks.
    """

    replicas: int | None = None
    scale: float = 1.0

    def __init__(
        self,
        count: ItemCounter,
        normalized: bool,
        auxiliary: bool = False,
        claimed: bool = True,
        balance: RouterBalance | None = None,
    ) -> None:
        self.count = count
        self.normalized = normalized
        self.auxiliary = auxiliary
        self.balance = balance
        self._claimed = claimed
        self.evaluation: Weighting | None = None
        self.kept: Mapping[str, Any] | None = None
        self.use(Weighting(count))
        self.verified = False

    def reject(self) -> None:
        """Treat the loss as a mean from now on, because it ignores ``num_items_in_batch``."""
        self.normalized, self.weight = False, self.weighting.count
        # Most models of transformers take any keyword argument, and classifiers return a mean all the same.
        logger.log(
            logging.WARNING if self._claimed else logging.DEBUG,
            "The loss does not depend on num_items_in_batch although the model accepts it: what it is the "
            "mean of is measured, and it is weighted by that number. To make this explicit, divide a summed "
            "loss by num_items_in_batch, or set `accepts_loss_kwargs = False` on the model.",
        )

    def declare(self, scaled: bool, replicas: int) -> None:
        """Follow ``loss_is_scaled_for_ga`` of a subclass, whose ``compute_loss`` is then not verified.

        Args:
            scaled: True: the losses of a step's micro-batches add up to the loss of the replica, and the replicas are
                averaged. False: each is the mean over the items of its micro-batch.
            replicas: number of data-parallel replicas.
        """
        self.normalized, self.verified = False, scaled
        self.replicas = replicas if scaled else None
        self.use(self.weighting)

    def to_json(self) -> Mapping[str, Any] | None:
        """What a checkpoint keeps: the weighting, if it is measured."""
        return None if self.normalized else self.weighting.to_json() or self.kept

    def use(self, weighting: Weighting) -> None:
        """Weight the losses that do not use the count like this."""
        self.weighting = weighting
        self.weight = self.count if self.normalized else weighting.count

    def verify(self, loss: torch.Tensor, items: torch.Tensor, again: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Determine whether ``loss`` uses ``items``.

        Args:
            loss: computed with ``items``.
            items: a leaf that requires gradient, or any tensor if there is no graph (evaluation).
            again: computes the loss once more, without graph and dropout, for another item count; called only if the
                graph does not show the dependence (a loss may read the number from the tensor).
        """
        if loss.requires_grad and depends_on(loss, items):
            self.verified = True
            return
        once, twice = again(items.detach()), again(2 * items.detach())
        if bool(abs(once - 2 * twice) > abs(once - twice)):
            self.reject()
        self.verified = self.normalized

    def contribution(self, loss: torch.Tensor, own: torch.Tensor | None, items: ItemCount) -> torch.Tensor:
        """Contribution of this micro-batch to the loss of the global batch.

        Args:
            loss: the loss of the model for ``items.divisor``, a scalar.
            own: :attr:`weight` of this micro-batch; needed for a mean loss, and 0 for a dummy batch.
            items: that of the global batch.
        """
        if self.replicas is not None:
            return loss / self.replicas
        if self.normalized:
            loss = loss if self.scale == 1.0 else loss / self.scale
            return loss if items.is_exact else loss * (items.divisor / items.exact())
        if self.weighting.summed:
            return loss
        assert own is not None  # the caller counts items for mean losses
        # The mean over no items is nan; it must not make the sum nan. What a count of 0 divides is infinite, and lost.
        return torch.where(own > 0, loss, loss.nan_to_num(posinf=torch.inf, neginf=-torch.inf)) * (
            own / items.counted.exact()
        )


def loss_rule_of(
    model: nn.Module,
    label_names: Sequence[str],
    *,
    compute_loss: Callable[..., Any] | None = None,
    loss_function: bool = False,
    smoothed: bool = False,
) -> LossRule:
    """The rule for a Trainer.

    Args:
        model: the innermost model.
        label_names: keys of a batch that may have labels.
        compute_loss: the method of a subclass, if it overrides ``compute_loss``.
        loss_function: whether a ``compute_loss_func`` computes the loss.
        smoothed: whether the Trainer computes the loss with label smoothing.
    """
    claimed = True
    if loss_function:
        normalized = True
    elif compute_loss is not None and not accepts_item_count(compute_loss):
        normalized = False  # without the count it can only return a mean
    elif smoothed:
        normalized = True
    else:
        declared = getattr(model, "accepts_loss_kwargs", None)
        normalized = accepts_item_count(model.forward) if declared is None else bool(declared)
        claimed = bool(declared) or "num_items_in_batch" in inspect.signature(compute_loss or model.forward).parameters
    rule = LossRule(ItemCounter(label_names, shifts_labels(model)), normalized, adds_auxiliary_loss(model), claimed)
    rule.verified = smoothed and compute_loss is None
    return rule

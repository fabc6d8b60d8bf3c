"""The loss rule: the gradient is a sum over items divided by the items of the whole global batch.

An *item* is what one term of the loss belongs to: a predicted token where labels are token ids, a sample elsewhere.
With ``l_i`` the loss of item ``i`` and ``N`` the number of items of all micro-batches of all replicas in one optimizer
step, the loss of the step is ``sum_i l_i / N``, whatever the layout, the accumulation and the padding.

Two kinds of loss get there:

* *normalised*: the model (or ``compute_loss``) takes ``num_items_in_batch = N`` and returns its own sum over ``N``.
  Hugging Face models do. Nothing is left to do.
* *mean*: the model returns the mean over the ``n`` items of its micro-batch and knows nothing of the others. Its loss
  is weighted with ``n / N``, which gives the same sum exactly.

A model that adds an auxiliary loss is called with ``n`` instead of ``N`` and weighted with ``n / N``
(:mod:`ds_trainer.training.auxiliary_loss`).

Which of the two a loss is gets verified on the first batch instead of trusted: a model may accept the keyword and
ignore it, and the gradient would silently come out too large.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.data.loader import FillerBatch
from ds_trainer.data.sequence_cut import IGNORED as IGNORED  # as in torch's cross-entropy and Hugging Face's collators
from ds_trainer.training.auxiliary_loss import adds_auxiliary_loss
from ds_trainer.training.batches import labels_in, number_of_samples
from ds_trainer.training.item_count import ItemCount
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_SHIFTING_LOSSES = ("ForCausalLM", "ForConditionalGeneration")  # Hugging Face loss types that shift labels inside
_GRAPH_NODES_LOOKED_AT = 200


def accepts_item_count(function: Callable[..., Any]) -> bool:
    """Whether ``function`` can be called with ``num_items_in_batch``."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return takes_any or "num_items_in_batch" in parameters


def shifts_labels(model: nn.Module) -> bool:
    """Whether position ``t`` of the model's output is compared with label ``t + 1``, so that label 0 is no target.

    A model of your own says so by an attribute ``shifts_labels = True``.
    """
    declared = getattr(model, "shifts_labels", None)
    if isinstance(declared, bool):
        return declared
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    kind = getattr(model, "loss_type", "")
    if kind is None:  # transformers knows no loss by the name of the class; where one is asked for, it takes this
        return _asks_for_loss_function(type(model))
    return str(kind).endswith(_SHIFTING_LOSSES)


def _asks_for_loss_function(model: type) -> bool:
    """Whether ``forward`` uses ``self.loss_function``, itself or in a base class that it calls."""
    for parent in model.__mro__:
        forward = vars(parent).get("forward")
        if forward is None:
            continue
        code = getattr(inspect.unwrap(forward), "__code__", None)
        names = () if code is None else code.co_names
        if "loss_function" in names:
            return True
        if "super" not in names:
            return False
    return False


class ItemCounter:
    """Counts the items of a micro-batch.

    Args:
        label_names: keys of the batch that may hold labels; the first one present is used.
        shifted: whether the model shifts labels itself (:func:`shifts_labels`).
    """

    def __init__(self, label_names: Sequence[str], shifted: bool) -> None:
        self.label_names = tuple(label_names)
        self.shifted = shifted

    def __call__(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Number of items as an int64 scalar, on the device of the labels (no synchronisation).

        Integer labels of two or more dimensions are token ids: positions other than -100 count, without the first one
        where the model shifts. Integer labels of one dimension count where they are not -100. Float labels, and
        batches without labels, count samples.
        """
        if isinstance(inputs, FillerBatch):
            return torch.zeros((), dtype=torch.int64)
        shifted = inputs.get("shift_labels")
        if isinstance(shifted, torch.Tensor):
            return shifted.ne(IGNORED).sum()
        name = labels_in(inputs, self.label_names)
        labels = inputs[name] if name is not None else None
        if not isinstance(labels, torch.Tensor) or labels.dim() == 0 or labels.is_floating_point():
            return torch.tensor(number_of_samples(inputs))
        targets = labels[..., 1:] if self.shifted and labels.dim() > 1 else labels
        return targets.ne(IGNORED).sum()


def depends_on(loss: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether ``leaf`` takes part in the computation of ``loss`` near its end (a bounded look at the graph)."""
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
    """The loss among a model's outputs: under ``"loss"``, the first element, or the output itself.

    Raises:
        ConfigError: there is no scalar in that place.
    """
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        loss = outputs[0] if outputs else None
    else:
        loss = getattr(outputs, "loss", outputs)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        what = f"only {', '.join(outputs)}" if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        core = getattr(model, "module", model)  # the engine is not what the user knows
        raise ConfigError(
            f"{type(core).__name__} returned no scalar loss for a batch of {', '.join(inputs)}; it returned {what}. "
            "Give it the labels it needs, pass a compute_loss_func, or override compute_loss."
        )
    return loss


class LossRule:
    """Turns the loss of one micro-batch into its share of the global batch's loss.

    Args:
        count: counts the items of a micro-batch.
        normalised: whether the loss is believed to be a sum divided by ``num_items_in_batch``.
        auxiliary: whether the model may add terms to it that are no sum over items.
    """

    def __init__(self, count: ItemCounter, normalised: bool, auxiliary: bool = False) -> None:
        self.count = count
        self.normalised = normalised
        self.auxiliary = auxiliary
        self.verified = not normalised  # weighting a mean needs no belief

    def reject(self) -> None:
        """The loss turned out to ignore ``num_items_in_batch``: treat it as a mean from now on."""
        self.normalised = False
        self.verified = True
        logger.warning(
            "The loss does not change with num_items_in_batch although the model accepts it: it is taken as the mean "
            "over the items of each micro-batch and weighted by their number. Use num_items_in_batch as the divisor of "
            "a summed loss, or set `accepts_loss_kwargs = False` on the model, to make this explicit."
        )

    def verify(self, loss: torch.Tensor, items: torch.Tensor, again: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Find out whether ``loss`` uses ``items``.

        Args:
            loss: computed with ``items``.
            items: a leaf that requires gradient, or any tensor where no graph exists (evaluation).
            again: computes the loss once more, without graph and dropout, for another item count; called only when
                the graph does not show the use (a loss may read the number out of the tensor).
        """
        if loss.requires_grad and depends_on(loss, items):
            self.verified = True
            return
        once, twice = again(items.detach()), again(2 * items.detach())
        if bool(abs(once - 2 * twice) > abs(once - twice)):
            self.reject()
        self.verified = True

    def contribution(self, loss: torch.Tensor, own: torch.Tensor | None, items: ItemCount) -> torch.Tensor:
        """Share of this micro-batch in the loss of the global batch.

        Args:
            loss: what the model returned for ``items.divisor``, a scalar.
            own: items of this micro-batch; needed for a mean loss, and 0 for a filler.
            items: items of the global batch.
        """
        if self.normalised:
            return loss if items.is_exact else loss * (items.divisor / items.exact())
        assert own is not None  # the caller counts for mean losses
        # A mean over nothing is nan, with a gradient of zero; it must not poison the sum.
        return torch.where(own > 0, loss, torch.nan_to_num(loss)) * (own / items.exact())


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
        label_names: keys of a batch that may hold labels.
        compute_loss: the method of a subclass, where it has one of its own.
        loss_function: a ``compute_loss_func`` computes the loss.
        smoothed: labels are smoothed, by our own loss.
    """
    if loss_function:
        normalised = True
    elif compute_loss is not None and not accepts_item_count(compute_loss):
        normalised = False  # one that never hears of the count returns a mean
    elif smoothed:
        normalised = True
    else:
        declared = getattr(model, "accepts_loss_kwargs", None)
        normalised = accepts_item_count(model.forward) if declared is None else bool(declared)
    rule = LossRule(ItemCounter(label_names, shifts_labels(model)), normalised, adds_auxiliary_loss(model))
    rule.verified = rule.verified or (smoothed and compute_loss is None)
    return rule

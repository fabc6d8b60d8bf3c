"""Label smoothing: part of the probability of each target is spread evenly over all classes.

With the factor ``e`` and ``V`` classes, the loss of an item is ``(1 - e) * -log p(target) + e * mean_v(-log p(v))``.
Source: Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7; transformers' ``LabelSmoother``. The
sum over items is divided by the items of the global batch, like every loss (:mod:`ds_trainer.training.loop.loss_rule`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer.data.columns import base_model
from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.training.model.label_shift import shifts_labels
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger, warn

logger = get_logger(__name__)

_MULTI_LABEL = "multi_label_classification"


def label_smoother(model: nn.Module, factor: float, label_names: Sequence[str]) -> LabelSmoother | None:
    """The smoother for ``model``; None for a factor of 0, and, with a warning, for multi-label classification.

    As in transformers, that is a ``UserWarning``. Another one says which labels are smoothed if there are several.

    Args:
        model: the model of the user.
        factor: ``label_smoothing_factor``.
        label_names: keys of a batch that may have labels.
    """
    if not factor:
        return None
    if getattr(getattr(model, "config", None), "problem_type", None) == _MULTI_LABEL:
        warn(
            f"label_smoothing_factor={factor} is ignored: the problem_type of the model is {_MULTI_LABEL}, whose "
            "labels are not classes.",
            UserWarning,
            stacklevel=2,
        )
        return None
    if len(label_names) > 1:
        warn(
            f"label_smoothing_factor={factor}: of the labels {', '.join(label_names)}, the first that a batch has is "
            "smoothed, and its loss is the whole loss. Name it alone in label_names, or set the factor to 0 to train "
            "with the loss of the model.",
            UserWarning,
            stacklevel=2,
        )
    if getattr(getattr(base_model(model), "config", None), "output_router_logits", False):
        logger.warning(
            "label_smoothing_factor=%s: the loss is computed from the logits, without the auxiliary loss of the router "
            "(output_router_logits=True). Set the factor to 0 to train with it.",
            factor,
        )
    return LabelSmoother(model, factor, label_names)


class LabelSmoother:
    """Removes the labels from a batch, and computes the smoothed loss from the logits of the model.

    Attributes:
        epsilon: the probability that is spread, as transformers names it.
    """

    def __init__(self, model: nn.Module, factor: float, label_names: Sequence[str]) -> None:
        self.model = base_model(model)
        self.epsilon = factor
        self.label_names = tuple(label_names)
        self.shifted = shifts_labels(self.model)
        self.encoder_decoder = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    def take_targets(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the targets of a batch, and remove the labels from it, so that the model does not compute a loss too.

        An encoder-decoder model derives the decoder input from the labels. It is derived here instead; if the model
        has no method for that, the labels stay in the batch.

        Returns:
            Classes, with the shape of the logits without the last dimension; -100 for positions without target.

        Raises:
            ConfigError: the batch has no labels, or they are not classes.
        """
        name = next((name for name in self.label_names if name in inputs), None)
        ready = inputs.pop("shift_labels", None)  # position t already holds the target of position t
        if name is None and ready is None:
            raise ConfigError(
                f"label_smoothing_factor={self.epsilon}, but a batch of {', '.join(inputs)} has no labels (looked for "
                f"{', '.join(self.label_names)}). Name them in label_names, or set the factor to 0."
            )
        labels = inputs[name] if name is not None else ready
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            what = labels.dtype if isinstance(labels, torch.Tensor) else type(labels).__name__
            raise ConfigError(
                f"label_smoothing_factor={self.epsilon} spreads the probability of classes, but '{name}' is {what}. "
                "Set it to 0, or let the labels be integers."
            )
        if self.encoder_decoder and "decoder_input_ids" not in inputs:
            prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
            if prepare is not None and name is not None:
                inputs["decoder_input_ids"] = prepare(labels=inputs.pop(name))
        elif name is not None:
            inputs.pop(name)
        if isinstance(ready, torch.Tensor):
            return ready
        if not self.shifted or labels.dim() < 2:
            return labels
        return _shifted(labels)

    def __call__(
        self, outputs: Any, targets: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The sum of the smoothed losses over ``num_items_in_batch``, or over the targets of this batch without it.

        Args:
            outputs: the outputs of the model, with ``"logits"`` or as first element ``[*targets.shape, V]`` logits.
            targets: the result of :meth:`take_targets`, or labels.
            shift_labels: whether they are labels of a causal language model, which predicts the next one.
            num_items_in_batch: items of the global batch.

        Raises:
            ConfigError: the logits do not fit the targets.
        """
        if shift_labels:
            targets = _shifted(targets)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[1 if _starts_with_loss(outputs) else 0]
        if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != targets.shape:
            shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise ConfigError(
                f"label_smoothing_factor={self.epsilon} needs one row of logits for each label, but labels are "
                f"{tuple(targets.shape)} and the logits of {type(self.model).__name__} are {shape}. Set it to 0, or "
                "smooth the labels in a compute_loss_func."
            )
        total = F.cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.epsilon,
        )
        return total / (targets.ne(IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    def with_loss(self, outputs: Any, loss: torch.Tensor) -> Any:
        """``outputs`` in the form that a model returns with labels: a tuple begins with the loss."""
        if isinstance(outputs, tuple) and not isinstance(outputs, Mapping) and not _starts_with_loss(outputs):
            return (loss, *outputs)
        return outputs


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """Targets of a causal language model. They are shifted, not the logits, whose copy would be far larger."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def _starts_with_loss(outputs: Any) -> bool:
    return isinstance(outputs[0], torch.Tensor) and outputs[0].dim() == 0


def smoothing_problems(factor: float, by_function: bool) -> list[str]:
    """Reasons against label smoothing. ``by_function``: a compute_loss_func computes the loss."""
    if not by_function:
        return []
    return [
        f"label_smoothing_factor={factor}, but compute_loss_func computes the loss and would ignore it. Smooth the "
        "labels there and set the factor to 0, or remove compute_loss_func."
    ]

"""How the sequences of a model's batches are cut: what the model and the loss must be able to take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ds_trainer.data.columns import base_model, forward_names, takes_any_name
from ds_trainer.data.sequence_cut import SequenceCut
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loss import shifts_labels
from ds_trainer.training.model.split_problems import library_models
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def sequence_cut_of(
    model: nn.Module,
    layout: ParallelLayout,
    label_names: Sequence[str],
    processing_class: Any = None,
    *,
    loss_function: Callable[..., Any] | None = None,
    own_loss: bool = False,
) -> SequenceCut | None:
    """The cut of ``layout`` for ``model``; None where sequences stay whole.

    Args:
        model: the model as it was handed in.
        layout: owner of ``cp`` and ``sp``.
        label_names: keys of a batch that may hold labels.
        processing_class: knows the padding token, where it is a tokenizer.
        loss_function: ``compute_loss_func``.
        own_loss: a subclass computes the loss.

    Raises:
        ConfigError: the model or the loss cannot be given parts of sequences.
    """
    if layout.cp * layout.sp == 1:
        return None
    core = base_model(model)
    shifts = shifts_labels(core)
    if shifts and loss_function is not None and not takes_shifted_labels(loss_function):
        raise ConfigError(
            f"compute_loss_func: {type(core).__name__} predicts the next token, and with sequences cut over "
            f"{layout.cp * layout.sp} ranks labels are shifted before the cut. Give the function an argument "
            "shift_labels (the target of position t at t, -100 for none) and let it compare the logits with that, "
            "unshifted; or set context_parallel_size and sequence_parallel_size to 1."
        )
    if shifts and own_loss:
        logger.warning(
            "compute_loss is the subclass's own, and sequences are cut: a batch has shift_labels (and the same under "
            "the name of its labels), the target of position t at t. A loss that shifts them itself would be wrong."
        )
    names = forward_names(core)
    if library_models(core) and takes_any_name(core):
        names = [*names, "position_ids"]  # handed on to the model inside; those that cannot take it are refused
    return SequenceCut(
        layout,
        shifts_labels=shifts,
        label_names=label_names,
        takes=names,
        takes_any=takes_any_name(core),
        pad_token_id=_padding_token(core, processing_class),
        own_positions=_numbers_by_mask(core),
        model_name=type(core).__name__,
    )


def takes_shifted_labels(function: Callable[..., Any]) -> bool:
    """Whether ``function`` names an argument ``shift_labels``: ``**kwargs`` alone promises nothing."""
    return "shift_labels" in inspect.signature(function).parameters


def _padding_token(model: nn.Module, processing_class: Any) -> int:
    """Any token will do, since nobody sees it and it has no target; but it must be one of the vocabulary."""
    for owner in (processing_class, getattr(model, "config", None)):
        token = getattr(owner, "pad_token_id", None)
        if isinstance(token, int) and token >= 0:
            return token
    return 0


def _numbers_by_mask(model: nn.Module) -> bool:
    """Whether positions are made of the attention mask, by an embedding that is called with it (OPT, BioGPT)."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any("attention_mask" in inspect.signature(table.forward).parameters for table in tables)

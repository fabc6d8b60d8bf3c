"""How the sequences of a model's batches are cut: what the model and the loss must be able to take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_trainer.data.columns import base_model, forward_names, takes_any_name
from ds_trainer.data.sequence_cut import SequenceCut
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loss import shifts_labels
from ds_trainer.training.model.split_check import check_cut_model
from ds_trainer.training.model.split_problems import library_models, split_problems
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def cut_or_reasons(model: nn.Module, layout: ParallelLayout, **about: Any) -> tuple[SequenceCut | None, list[str]]:
    """:func:`sequence_cut_of`, or None and why there is none although ``layout`` asks for it.

    Without a cut a model can be evaluated all the same: all ranks of a replica work on the whole batch.
    """
    reasons = split_problems(model, layout)
    if reasons:
        return None, reasons
    try:
        return sequence_cut_of(model, layout, **about), []
    except ConfigError as error:
        return None, error.problems


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


def check_cut(
    model: nn.Module,
    cut: SequenceCut,
    batch: Mapping[str, Any],
    groups: ParallelGroups,
    prepare: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Compare ``model`` on the head of a batch, whole and cut (:func:`check_cut_model`). Collective over all ranks.

    A model whose outputs hold nothing for each token cannot be compared; a warning says so.

    Args:
        model: the engine.
        cut: how its batches are cut.
        batch: whole sequences, the same on all ranks of a replica.
        groups: the process groups of the layout.
        prepare: brings a batch to the device.

    Raises:
        ConfigError: the results differ by more than rounding.
    """
    core = base_model(model)
    head = cut.head(batch, 4 * groups.layout.cp * groups.layout.sp)
    own, plan = cut.cut(head, groups.place.cp, groups.place.sp)
    length = cut.length(head)
    # Beside a KV cache, transformers does not look for documents in position_ids.
    without_cache = {"use_cache": False} if library_models(core) and "use_cache" in forward_names(core) else {}
    with torch.no_grad():
        found = _of_each_token(model(**prepare(head), **without_cache), length)
    if found is None:
        logger.warning(
            "%s returns nothing for each token beside its loss, so that its results for cut sequences cannot be "
            "compared with those for whole ones. Let it return its logits as well, [batch, tokens, ...].",
            type(core).__name__,
        )
        return

    def whole() -> torch.Tensor:
        result = _value(model(**prepare(head), **without_cache), found)
        missing = plan.length - length  # filled up, as the cut sequence is; nobody compares these
        return nn.functional.pad(result, (0, 0) * (result.dim() - 2) + (0, missing))

    check_cut_model(model, whole, lambda: _value(model(**prepare(own), **without_cache), found), plan, groups)


def _of_each_token(outputs: Any, length: int) -> Any:
    """Key or place of the first output that has a value for each token; None where there is none."""
    items = outputs.items() if isinstance(outputs, Mapping) else enumerate(_sequence(outputs))
    for key, value in items:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[1:2] == (length,):
            return key
    return None


def _sequence(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def _value(outputs: Any, key: Any) -> torch.Tensor:
    value: torch.Tensor = outputs[key] if isinstance(outputs, Mapping) else _sequence(outputs)[key]
    return value


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

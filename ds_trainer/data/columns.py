"""Which columns of a dataset a model accepts, and which of them are labels."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

# The collators of transformers rename the first two to the third.
_LABEL_COLUMNS = ("label", "label_ids", "labels")
_SPAN_LABELS = ("start_positions", "end_positions")
_NO_NAMES = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def base_model(model: nn.Module) -> nn.Module:
    """The user's model, without wrappers: PEFT, torch.compile, an engine."""
    while True:
        unwrap = getattr(model, "get_base_model", None)  # PEFT
        inner = unwrap() if callable(unwrap) else getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None and not _has_own_names(model):
            inner = getattr(model, "module", None)  # DeepSpeed, DataParallel: their forward accepts anything
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def forward_names(model: nn.Module) -> list[str]:
    """Names of the arguments of ``forward``, without ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(base_model(model).forward).parameters.values()
    return [p.name for p in parameters if p.kind not in _NO_NAMES]


def accepts_any_keyword(model: nn.Module) -> bool:
    """Whether ``forward`` has ``**kwargs``."""
    parameters = inspect.signature(base_model(model).forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def can_be_called_with(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the items of ``batch`` may be the keyword arguments of ``forward``; otherwise a subclass unpacks them."""
    names = set(forward_names(model))
    return not names.isdisjoint(batch) and (accepts_any_keyword(model) or names.issuperset(batch))


def find_label_names(model: nn.Module) -> list[str]:
    """The arguments of ``model.forward`` that are labels: those with "label" in their name, without ``shift_labels``
    (a copy of the labels); for question answering also the start and end positions. Empty if there are none.
    """
    core = base_model(model)
    spans = _SPAN_LABELS if any("QuestionAnswering" in base.__name__ for base in type(core).__mro__) else ()
    return [name for name in forward_names(core) if ("label" in name and name != "shift_labels") or name in spans]


def accepted_columns(model: nn.Module, label_names: Sequence[str]) -> set[str] | None:
    """Columns that ``model`` can use; None if its ``forward`` names no arguments, so that they are unknown."""
    names = forward_names(model)
    from_data = [name for name in names if name != "num_items_in_batch"]  # that one comes from the Trainer
    return {*names, *label_names, *_LABEL_COLUMNS} if from_data else None


def drop_unused_columns(dataset: Any, model: nn.Module, wanted: Collection[str] | None, quiet: bool = False) -> Any:
    """A ``datasets.Dataset`` with the columns in ``wanted`` (None: all) only; any other dataset unchanged.

    Args:
        dataset: the data.
        model: named in messages.
        wanted: :func:`accepted_columns`, or what a subclass of the Trainer accepts.
        quiet: whether the log does not name the removed columns.

    Raises:
        ConfigError: no column would remain.
    """
    if wanted is None or not has_columns(dataset):
        return dataset
    unused = [name for name in dataset.column_names if name not in wanted]
    if not unused:
        return dataset
    if len(unused) == len(dataset.column_names):
        core = base_model(model)
        raise nothing_left("the dataset's columns", unused, type(core).__name__, forward_names(core))
    name = type(base_model(model)).__name__
    level = logging.DEBUG if quiet else logging.INFO
    logger.log(level, "Removed the columns that %s.forward does not accept: %s.", name, ", ".join(unused))
    return dataset.remove_columns(unused)


def has_columns(dataset: Any) -> bool:
    """Whether this is a table like ``datasets.Dataset``: named columns that can be removed, and indexed rows."""
    return (
        hasattr(dataset, "remove_columns")
        and hasattr(dataset, "__getitem__")
        and isinstance(getattr(dataset, "column_names", None), (list, tuple))
    )


def nothing_left(what: str, names: Sequence[str], model_name: str, taken: Sequence[str]) -> ConfigError:
    """The error for samples of which a model accepts no part."""
    return ConfigError(
        f"{model_name}.forward accepts none of {what} ({', '.join(names)}), only {', '.join(taken)}. Tokenize the "
        "dataset first, or set remove_unused_columns=False and pass a data_collator that returns the model's inputs."
    )


def _has_own_names(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.kind not in _NO_NAMES for p in parameters)

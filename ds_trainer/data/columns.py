"""Which columns of a dataset a model can take."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_LABEL_COLUMNS = ("label", "label_ids", "labels")


def drop_unused_columns(dataset: Any, model: nn.Module, label_names: Sequence[str]) -> Any:
    """A ``datasets.Dataset`` without the columns that ``model.forward`` does not name; any other dataset unchanged.

    Raises:
        ConfigError: no column would remain.
    """
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "remove_columns"):
        return dataset
    signature = inspect.signature(model.forward)
    wanted = {*signature.parameters, *label_names, *_LABEL_COLUMNS}
    unused = [name for name in dataset.column_names if name not in wanted]
    if not unused:
        return dataset
    if len(unused) == len(dataset.column_names):
        raise ConfigError(
            f"The dataset's columns ({', '.join(dataset.column_names)}) are none that {type(model).__name__}.forward "
            f"takes ({', '.join(signature.parameters)}). Tokenize the dataset first, or set "
            "remove_unused_columns=False and pass a data_collator that makes the model's inputs."
        )
    logger.info("Columns that %s.forward does not take are left out: %s.", type(model).__name__, ", ".join(unused))
    return dataset.remove_columns(unused)

"""The number of the source of every token, which samples of several sources carry into the batch.

A dataset whose samples carry numbers has ``source_names``, the names of the sources by number. A sample then has
``source_ids``, one integer per token, which collators, packing and sequence sharding treat as any other value per
token. The model never gets it: ``Trainer._prepare_inputs`` takes it out of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

SOURCE_IDS = "source_ids"
"""Key of samples and batches: int64 ``[tokens]`` and ``[samples, tokens]``."""
_INSIDE = ("dataset", "stream")
_DEPTH = 4


def source_names(dataset: Any) -> tuple[str, ...]:
    """The names of the sources whose numbers the samples of ``dataset`` carry; empty if they carry none.

    Looks into datasets that wrap another one, such as packed rows.
    """
    for _ in range(_DEPTH):
        names = getattr(dataset, "source_names", None)
        if isinstance(names, (tuple, list)):
            return tuple(names)
        dataset = next((inner for key in _INSIDE if (inner := getattr(dataset, key, None)) is not None), None)
        if dataset is None:
            return ()
    return ()


def with_source(sample: Mapping[str, Any], number: int) -> dict[str, Any]:
    """``sample`` with the number of its source at each of its tokens."""
    return {**sample, SOURCE_IDS: torch.full((len(sample["input_ids"]),), number, dtype=torch.int64)}

"""From a list of samples to one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ds_trainer.utils.errors import ConfigError

_LABEL_NAMES = ("label", "label_ids")


def default_data_collator(features: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Stack samples of equal shapes: dicts of numbers, lists, arrays or tensors become a dict of tensors ``[B, ...]``.

    As Hugging Face's collator of the same name: ``label`` and ``label_ids`` become ``labels``, strings and ``None``
    are left out.

    Raises:
        ConfigError: a sample is no mapping, or the samples of a key differ in shape.
    """
    rows = [feature if isinstance(feature, Mapping) else vars(feature) for feature in map(_checked, features)]
    batch: dict[str, torch.Tensor] = {}
    for key, example in rows[0].items():
        if example is None or isinstance(example, str):
            continue
        try:
            stacked = _stack([row[key] for row in rows])
        except (ValueError, RuntimeError, TypeError) as error:
            shapes = sorted({str(np.shape(row[key])) for row in rows if row.get(key) is not None})
            raise ConfigError(
                f"The samples of a batch differ in '{key}': shapes {', '.join(shapes)}. Pad them to one length in the "
                "dataset, or pass a data_collator that does (transformers.DataCollatorForSeq2Seq, for instance)."
            ) from error
        except KeyError as error:
            raise ConfigError(f"Some samples of a batch have no '{key}', others do.") from error
        batch["labels" if key in _LABEL_NAMES else key] = stacked
    return batch


def _checked(feature: Any) -> Any:
    if not isinstance(feature, Mapping) and not hasattr(feature, "__dict__"):
        raise ConfigError(
            f"A sample of the dataset is a {type(feature).__name__}, but a model is called by keyword: samples must be "
            "dicts like {'input_ids': ..., 'labels': ...}, or pass a data_collator that makes such batches."
        )
    return feature


def _stack(values: list[Any]) -> torch.Tensor:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(values)
    return torch.from_numpy(_as_64_bit_integers(np.stack([np.asarray(value) for value in values])))


def _as_64_bit_integers(array: np.ndarray) -> np.ndarray:
    """Python integers become int64 and Python floats float32, as torch does it; booleans stay."""
    if array.dtype == object:
        raise ValueError("no numbers")
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64, copy=False)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    return array


def collator_for(processing_class: Any) -> Callable[[list[Any]], Any]:
    """The collator of a run that names none: padding for a tokenizer or feature extractor, stacking otherwise.

    Only their classes are looked at, so nothing is imported that the user has not imported already.
    """
    kinds = {base.__name__ for base in type(processing_class).__mro__}
    if kinds & {"PreTrainedTokenizerBase", "SequenceFeatureExtractor"}:
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(processing_class)
    return default_data_collator


_OF_TRANSFORMERS = (
    "DataCollatorForLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
)


def __getattr__(name: str) -> Any:
    """Collators of transformers, under their names: they know every tokenizer, and scripts change one import only.

    Raises:
        ConfigError: transformers is not installed.
    """
    if name not in _OF_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{name} comes from transformers, which is not installed: pip install 'ds-trainer[hf]', or pass a "
            "data_collator of your own."
        ) from error
    return getattr(transformers, name)

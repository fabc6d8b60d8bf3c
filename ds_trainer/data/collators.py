"""Collators: from a list of samples to one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ds_trainer.data.columns import base_model, forward_names, nothing_left
from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.data.source_ids import SOURCE_IDS
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_FRAMEWORKS = ("pt", "np")


def default_data_collator(features: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack samples of equal shapes: dicts of numbers, lists, arrays or tensors become a dict of tensors ``[B, ...]``.

    As transformers' collator of the same name: ``label`` (a number per sample) or else ``label_ids`` become ``labels``,
    of 64-bit integers or 32-bit floats; strings and ``None`` are left out.

    Args:
        features: the samples.
        return_tensors: ``"pt"`` for tensors of torch, which training needs, or ``"np"`` for arrays of numpy.

    Raises:
        ConfigError: another ``return_tensors``; a sample is not a mapping; the samples of a key differ in shape; labels
            are texts.
    """
    if return_tensors not in _FRAMEWORKS:
        raise ConfigError(
            f"default_data_collator: return_tensors={return_tensors!r} is not supported. Use 'pt' (tensors of torch, "
            "which the Trainer needs) or 'np' (arrays of numpy)."
        )
    rows = [feature if isinstance(feature, Mapping) else _attributes(feature) for feature in features]
    stack = _stack if return_tensors == "pt" else _array
    first = rows[0]
    label = next((name for name in ("label", "label_ids") if first.get(name) is not None), "label")
    if isinstance(first.get(label), str):
        raise ConfigError(
            f"'{label}' of a sample is the text {first[label]!r}. Replace the names of classes by numbers in the "
            f"dataset: dataset.class_encode_column('{label}')."
        )
    batch: dict[str, Any] = {}
    for key, example in first.items():
        if example is None or isinstance(example, str) or (key in ("label", "label_ids") and key != label):
            continue
        try:
            stacked = stack([row[key] for row in rows])
        except (ValueError, RuntimeError, TypeError) as error:
            shapes = sorted({str(np.shape(row[key])) for row in rows if row.get(key) is not None})
            raise ConfigError(
                f"The samples of a batch differ in '{key}': shapes {', '.join(shapes)}. Pad them to one length in the "
                "dataset, or pass a data_collator that pads (transformers.DataCollatorForSeq2Seq, for example)."
            ) from error
        except KeyError as error:
            raise ConfigError(f"Only some samples of a batch have '{key}'. Give all samples the same keys.") from error
        if key == "label" or (key == "label_ids" and not isinstance(example, (torch.Tensor, np.ndarray))):
            stacked = _as_labels(stacked)
        batch["labels" if key == label else key] = stacked
    return batch


@dataclass
class DefaultDataCollator:
    """:func:`default_data_collator` as an object.

    Attributes:
        return_tensors: ``"pt"`` or ``"np"``.
    """

    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> dict[str, Any]:
        """The batch of ``features``; ``return_tensors`` overrides the attribute.

        Raises:
            ConfigError: what :func:`default_data_collator` refuses.
        """
        return default_data_collator(features, self.return_tensors if return_tensors is None else return_tensors)


def _attributes(feature: Any) -> dict[str, Any]:
    if not hasattr(feature, "__dict__"):
        raise ConfigError(
            f"A sample of the dataset is a {type(feature).__name__}, but models are called with keywords. Make samples "
            "dicts like {'input_ids': ..., 'labels': ...}, or pass a data_collator that returns such batches."
        )
    return vars(feature)


def _stack(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    return torch.from_numpy(_as_64_bit_integers(_array(values)))


def _array(values: list[Any]) -> np.ndarray:
    array = np.stack([np.asarray(value) for value in values])
    if array.dtype == object:
        raise ValueError("no numbers")
    return array


def _as_64_bit_integers(array: np.ndarray) -> np.ndarray:
    """Python integers become int64 and Python floats float32, as in torch; booleans stay."""
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64, copy=False)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    return array


def _as_labels(stacked: Any) -> Any:
    """Classes as 64-bit integers, regression targets as 32-bit floats."""
    if isinstance(stacked, torch.Tensor):
        return stacked.float() if stacked.is_floating_point() else stacked.long()
    return stacked.astype(np.float32 if np.issubdtype(stacked.dtype, np.floating) else np.int64)


def collator_for(processing_class: Any) -> Callable[[list[Any]], Any]:
    """The default collator: padding for a tokenizer or feature extractor, stacking otherwise.

    Classes are compared by name, so that transformers is not imported unless the user has imported it.
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
)


def __getattr__(name: str) -> Any:
    """Collators of transformers, under their names, so that scripts change one import only.

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


class TokenPaddingCollator:
    """Pads samples on the right to the longest of the batch.

    Args:
        pad_token_id: the token of padding; any one will do, because no token attends to it and it is no target.

    A sample has ``input_ids`` and ``labels``, integers ``[tokens]``; a batch has both and ``attention_mask``, int64
    ``[samples, longest]``, and ``source_ids`` if they have them. Other keys of samples are left out.
    """

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch of ``features``."""
        tokens = [torch.as_tensor(sample["input_ids"], dtype=torch.int64) for sample in features]
        labels = [torch.as_tensor(sample["labels"], dtype=torch.int64) for sample in features]
        batch = {
            "input_ids": pad_sequence(tokens, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        }
        if SOURCE_IDS in features[0]:
            batch[SOURCE_IDS] = pad_sequence([sample[SOURCE_IDS] for sample in features], batch_first=True)
        return batch


class ColumnFilterCollator:
    """A collator that removes the keys that the model does not accept from the samples.

    For datasets without columns, whose keys are only known when samples are read.

    Args:
        collate: the wrapped collator. Samples that are not dicts are passed unchanged.
        model: named in messages.
        wanted: the accepted keys, from :func:`~ds_trainer.data.columns.accepted_columns`; None: all.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], model: nn.Module, wanted: Collection[str] | None) -> None:
        self.collate = collate
        self._wanted = None if wanted is None else frozenset(wanted)
        self._model_name = type(base_model(model)).__name__
        self._names = forward_names(model)
        self._logged = False

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of ``samples``.

        Raises:
            ConfigError: no key of a sample is accepted, or the collator needs a key that was removed.
        """
        wanted = self._wanted
        if wanted is None or not all(isinstance(sample, Mapping) for sample in samples):
            return self.collate(samples)
        unused = sorted(map(str, set().union(*samples) - wanted))
        kept = [{key: value for key, value in sample.items() if key in wanted} for sample in samples]
        if unused and not all(kept):
            raise nothing_left("a sample's keys", unused, self._model_name, self._names)
        if unused and not self._logged:
            self._logged = True
            names = ", ".join(unused)
            logger.info("Removed the keys that %s.forward does not accept: %s.", self._model_name, names)
        try:
            return self.collate(kept)
        except KeyError as error:
            if error.args and str(error.args[0]) in unused:
                raise ConfigError(
                    f"The data_collator needs '{error.args[0]}', which was removed from the samples because "
                    f"{self._model_name}.forward does not accept it. Set remove_unused_columns=False."
                ) from error
            raise

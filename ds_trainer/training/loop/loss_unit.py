"""What the loss of a micro-batch may be a mean of: candidates that a measurement compares.

A candidate counts something of each sample: the sample itself, its labels other than an ignored value, the entries of a
mask, its boxes. The list follows from the names, dtypes and dimensions of a batch only, so all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_trainer.data.batch_structure import Dummy, number_of_samples
from ds_trainer.training.loop.loss_rule import IGNORED

_IGNORED = (IGNORED, 255, -1, 0)  # of transformers and torch, of segmentation, of detection, of padded labels
_FRACTIONS = 2**20  # of a weight; counts are integers


@dataclass(frozen=True)
class Unit:
    """Counts what a loss may be the mean of.

    Attributes:
        key: key of the batch that is counted; empty for the samples.
        ignored: entries of this value do not count.
        shifted: whether the first entry of each row does not count.
        summed: the values themselves are added up; they are lengths or weights.
        parts: what one entry counts: more than 1 for weights, because counts are integers.
    """

    key: str = ""
    ignored: int = 0
    shifted: bool = False
    summed: bool = False
    parts: int = 1

    def rows(self, inputs: Any) -> torch.Tensor:
        """The count of each sample: float64 ``[samples]``."""
        value = inputs.get(self.key) if self.key and isinstance(inputs, Mapping) else None
        if isinstance(value, (list, tuple)):
            return torch.tensor([_entries(entry) for entry in value], dtype=torch.float64)
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return torch.ones(number_of_samples(inputs), dtype=torch.float64)
        if self.summed:
            value = value.double() * self.parts
            return value.flatten(1).sum(1) if value.dim() > 1 else value
        counted = value.ne(self.ignored) & ~value.isnan() if value.is_floating_point() else value.ne(self.ignored)
        counted = counted[:, 1:] if self.shifted else counted
        return counted.flatten(1).sum(1).double() if counted.dim() > 1 else counted.double()

    def __call__(self, inputs: Any) -> torch.Tensor:
        """The count of a batch: an int64 scalar; 0 for a dummy. Does not wait for the device."""
        if isinstance(inputs, Dummy):
            return torch.zeros((), dtype=torch.int64)
        return self.rows(inputs).sum().long()

    def __str__(self) -> str:
        if not self.key:
            return "samples"
        if self.summed:
            return f"entries, weighted or counted by {self.key!r},"
        first = " after the first of each row" if self.shifted else ""
        return f"entries of {self.key!r}{first} other than {self.ignored}"


SAMPLES = Unit()


def units_of(batch: Any, label_names: Sequence[str], config: Any) -> tuple[list[Unit], list[Unit]]:
    """The candidates for ``batch``, beside its items and its samples: those to be preferred to these, and the others.

    Args:
        batch: a micro-batch.
        label_names: keys that may be labels.
        config: the configuration of the model; may name a value of labels that is ignored.
    """
    ignored, known = [*_IGNORED], getattr(config, "semantic_loss_ignore_index", None)
    if type(padding := getattr(config, "pad_token_id", None)) is int and padding not in ignored:
        ignored.append(padding)
    preferred: list[Unit] = []
    others: list[Unit] = []
    for key, value in sorted(batch.items(), key=lambda item: str(item[0])) if isinstance(batch, Mapping) else ():
        is_label = key in label_names or "label" in str(key)
        if isinstance(value, (list, tuple)) and is_label:
            others.append(Unit(key))
        elif not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        elif is_label:
            if type(known) is int and value.dim() > 2:
                preferred.append(Unit(key, known))
            shifts = (False, True) if value.dim() > 1 and not value.is_floating_point() else (False,)
            # 0 is a class if there is one label for each sample.
            others += [Unit(key, entry, shift) for shift in shifts for entry in ignored if value.dim() > 1 or entry < 0]
        elif value.is_floating_point() and _are_weights(str(key), value):
            others.append(Unit(key, summed=True, parts=_FRACTIONS))
        elif value.dim() == 1 and not value.is_floating_point() and value.dtype is not torch.bool:
            others.append(Unit(key, summed=True))  # lengths
        elif value.dim() > 1 and ("mask" in str(key) or value.dtype is torch.bool or _is_mask(value)):
            others += [Unit(key), Unit(key, shifted=True)]
        elif value.dim() == 2 and not value.is_floating_point():  # tokens, which may be the labels too
            others += [Unit(key, entry, shift) for shift in (False, True) for entry in ignored]
        elif value.dim() > 1 and value.is_floating_point():
            others += [Unit(key, entry) for entry in (IGNORED, -1) if bool(value.eq(entry).any())]  # padding
    return preferred, others


def _are_weights(key: str, value: torch.Tensor) -> bool:
    soft = value.dim() == 1 or ("mask" in key and not _is_mask(value))
    return "weight" in key or (soft and bool((value >= 0).all()))


def _is_mask(value: torch.Tensor) -> bool:
    return value.is_floating_point() and bool((value.eq(0) | value.eq(1)).all())


def _entries(value: Any) -> int:
    """Rows of the first tensor of a sample's labels: its boxes, its masks."""
    parts = value.values() if isinstance(value, Mapping) else [value]
    return next((len(part) for part in parts if isinstance(part, (torch.Tensor, list)) and _rows(part)), 1)


def _rows(part: Any) -> bool:
    return not isinstance(part, torch.Tensor) or part.dim() > 0

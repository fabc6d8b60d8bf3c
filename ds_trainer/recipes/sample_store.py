"""``SampleStore``: tokenized samples in memory, 8 bytes per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IGNORED = -100


class SampleStore(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of different lengths, one after the other in two arrays.

    A sample that is added has ``input_ids`` and ``labels``, int32 ``[tokens]``; one that is read has both as int64
    tensors.

    Attributes:
        trained_tokens: tokens of all samples that are targets; the first one of a sample is none, nothing predicts it.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
        self._joined: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None
        self._lengths: list[int] = []
        self.trained_tokens = 0
        self._ends: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Add a sample behind the others."""
        part = (np.asarray(sample["input_ids"], np.int32), np.asarray(sample["labels"], np.int32))
        self._parts.append(part)
        self._lengths.append(len(part[0]))
        self.trained_tokens += int((part[1][1:] != IGNORED).sum())
        self._joined = None

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every sample, int32 ``[samples]``."""
        return np.asarray(self._lengths, np.int32)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        tokens, labels = self._arrays()
        end = int(self._ends[index])
        inside = slice(end - self._lengths[index], end)
        return {
            "input_ids": torch.from_numpy(tokens[inside].astype(np.int64)),
            "labels": torch.from_numpy(labels[inside].astype(np.int64)),
        }

    def _arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        if self._joined is None:
            parts = self._parts or [(np.zeros(0, np.int32), np.zeros(0, np.int32))]
            self._joined = (np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))
            self._parts = [self._joined]
            self._ends = np.cumsum(self._lengths, dtype=np.int64)
        return self._joined

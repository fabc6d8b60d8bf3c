"""Lengths that a dataset knows without reading its samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset


def stored_lengths(dataset: Any) -> npt.NDArray[np.int32] | None:
    """Tokens of every sample, int32 ``[samples]``; None if the dataset does not know them.

    A dataset knows them if its attribute ``lengths`` is an array with one integer per sample, as that of a
    :class:`~ds_trainer.samples.prepared.dataset.PreparedDataset`. Subsets and concatenations of such datasets know them
    too, with a copy of four bytes per sample.
    """
    if isinstance(dataset, Subset):
        whole = stored_lengths(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        each = [stored_lengths(part) for part in dataset.datasets]
        known = [lengths for lengths in each if lengths is not None]
        return np.concatenate(known) if len(known) == len(each) else None
    lengths = getattr(dataset, "lengths", None)
    if not isinstance(lengths, np.ndarray) or lengths.dtype.kind not in "iu" or lengths.shape != (len(dataset),):
        return None
    return lengths.astype(np.int32, copy=False)

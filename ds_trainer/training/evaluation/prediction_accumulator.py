"""``PredictionAccumulator``: collects results on the device for some micro-steps, then in host memory.

Host memory for the whole dataset is allocated when the first results arrive, and each batch is written to it once. So
the peak is the result and the micro-steps on the device; collecting batches and concatenating them at the end would
take twice the result. (Allocated memory that was not written to takes no physical memory.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ds_trainer.training.evaluation.nested import PADDING, concatenate, leaves_of, map_leaves, to_numpy
from ds_trainer.utils.errors import ConfigError


class GrowingArray:
    """An array to which rows are added.

    Added arrays may differ in later dimensions: all rows get the largest size there, padded with -100 on the right.

    Args:
        like: the first array to be added; a scalar is one row.
        rows: expected number of rows; more are possible.
    """

    def __init__(self, like: np.ndarray, rows: int = 0) -> None:
        like = np.atleast_1d(like)
        self._rows = 0
        self._whole = np.empty((max(rows, len(like)), *like.shape[1:]), dtype=like.dtype)

    def add(self, piece: np.ndarray, positions: np.ndarray | None = None) -> None:
        """Add the rows of ``piece``: at the indices ``positions`` below ``rows``, or at the end.

        Raises:
            TypeError: the number of dimensions differs, or the number of rows is not that of ``positions``.
        """
        piece = np.atleast_1d(piece)
        if positions is not None and len(positions) != len(piece):
            raise TypeError(
                f"the order of {len(positions)} samples must be restored, but an array has length {len(piece)}"
            )
        if piece.ndim != self._whole.ndim:
            raise TypeError(f"arrays with different numbers of dimensions: {self._whole.shape} and {piece.shape}")
        start, end = self._rows, self._rows + len(piece)
        rows = len(self._whole)
        if end > rows:
            rows = max(end, rows + rows // 2)
        sizes = tuple(max(pair) for pair in zip(self._whole.shape[1:], piece.shape[1:], strict=True))
        dtype = np.result_type(self._whole.dtype, piece.dtype)
        if (rows, *sizes) != self._whole.shape or dtype != self._whole.dtype:
            before = self._whole if positions is not None else self._whole[:start]
            self._whole = np.empty((rows, *sizes), dtype=dtype)
            self._write(before, slice(0, len(before)))
        self._write(piece, slice(start, end) if positions is None else positions)
        self._rows = end

    def _write(self, piece: np.ndarray, positions: slice | np.ndarray) -> None:
        if piece.shape[1:] != self._whole.shape[1:]:
            self._whole[positions] = np.asarray(PADDING).astype(self._whole.dtype)
        self._whole[(positions, *(slice(0, size) for size in piece.shape[1:]))] = piece

    def result(self) -> np.ndarray:
        """All rows. Do not add rows afterwards."""
        return self._whole[: self._rows]


class PredictionAccumulator:
    """One kind of result over all micro-steps: on the device first, in host memory after :meth:`to_host`.

    Attributes:
        device_bytes: held on a device by the results that :meth:`to_host` would move.
        host: the kind of device that is host memory.

    Args:
        join: return one structure of whole arrays, instead of a list with an entry per micro-step.
        samples_in_lists: see :func:`ds_trainer.training.evaluation.nested.concatenate`.
        rows: number of samples, if known.
    """

    host = "cpu"

    def __init__(self, join: bool, samples_in_lists: bool, rows: int = 0) -> None:
        self._join = join
        self._samples_in_lists = samples_in_lists
        self._rows = rows
        self._on_device: list[tuple[Any, np.ndarray | None]] = []
        self.device_bytes = 0
        self._on_host: list[Any] = []
        self._growing: Any = None

    def add(self, piece: Any, positions: np.ndarray | None = None) -> None:
        """Add the results of a micro-step; None for none. ``positions``: their rows in the result, if not in order."""
        if piece is not None:
            self._on_device.append((piece, positions))
            tensors = [leaf for leaf in leaves_of(piece) if isinstance(leaf, torch.Tensor)]
            held = [leaf for leaf in tensors if leaf.device.type != self.host]
            self.device_bytes += sum(leaf.untyped_storage().nbytes() for leaf in held)  # a view holds all of it

    def to_host(self) -> None:
        """Move the results added since the last call to host memory."""
        waiting, self._on_device, self.device_bytes = self._on_device[::-1], [], 0
        while waiting:
            tree, positions = waiting.pop()  # frees each micro-step as soon as it is written
            piece = to_numpy(tree)
            if not self._join or self._samples_in_lists:
                self._on_host.append(piece)
                continue
            with _explaining_type_errors():
                if self._growing is None:
                    self._growing = map_leaves(self._begun, piece)
                _grow(self._growing, piece, positions)

    def result(self) -> Any:
        """All results as numpy arrays; None if nothing was added."""
        self.to_host()
        if self._growing is not None:
            return map_leaves(lambda leaf: leaf.result(), self._growing)
        if not self._on_host or not self._join:
            return self._on_host or None
        with _explaining_type_errors():
            return concatenate(self._on_host, samples_in_lists=True)

    def _begun(self, leaf: Any) -> GrowingArray:
        if not isinstance(leaf, np.ndarray):
            raise TypeError(f"values of type {_name(leaf)} cannot be concatenated")
        return GrowingArray(leaf, self._rows)


def _grow(growing: Any, piece: Any, positions: np.ndarray | None) -> None:
    """Add the arrays of ``piece`` to those of ``growing``, structure by structure.

    Raises:
        TypeError: their structures differ.
    """
    if isinstance(growing, GrowingArray) and isinstance(piece, np.ndarray):
        growing.add(piece, positions)
        return
    if _name(growing) != _name(piece):
        raise TypeError(f"some batches have a {_name(growing)} where others have a {_name(piece)}")
    if isinstance(growing, Mapping):
        if set(growing) != set(piece):
            raise TypeError(f"batches have dicts with different keys: {sorted(growing)} and {sorted(piece)}")
        for key, value in growing.items():
            _grow(value, piece[key], positions)
    elif growing is not None:
        if len(growing) != len(piece):
            raise TypeError(f"batches have a {_name(growing)} of different lengths: {len(growing)} and {len(piece)}")
        for inner, part in zip(growing, piece, strict=True):
            _grow(inner, part, positions)


def _name(value: Any) -> str:
    return "array" if isinstance(value, (GrowingArray, np.ndarray)) else type(value).__name__


@contextmanager
def _explaining_type_errors() -> Iterator[None]:
    """Raises ConfigError with a remedy for outputs that cannot be concatenated."""
    try:
        yield
    except TypeError as error:
        raise ConfigError(
            f"The outputs of the batches of an evaluation cannot be concatenated: {error}. Set "
            "eval_do_concat_batches=False to get a list of batches, or name such outputs in ignore_keys."
        ) from error

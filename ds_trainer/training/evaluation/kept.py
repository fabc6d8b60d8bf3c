"""What an evaluation keeps: on the device for some rounds, then in host memory, where it is written once.

Host memory for the whole result is laid out when the first round arrives, as long as the dataset. So the peak is the
result and the rounds on the device, not the result twice as where pieces are collected and joined at the end. (Memory
that nothing was written to takes no room.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ds_trainer.training.evaluation.nested import PADDING, joined, map_leaves, on_host
from ds_trainer.utils.errors import ConfigError


class GrowingArray:
    """Rows of an array, added piece by piece.

    Pieces may differ in later dimensions: all rows get the largest size there, filled up with -100 on the right.

    Args:
        like: the first piece to be added; a scalar is one row.
        rows: how many rows there will be, as far as is known; more are possible.
    """

    def __init__(self, like: np.ndarray, rows: int = 0) -> None:
        like = np.atleast_1d(like)
        self._rows = 0
        self._whole = np.empty((max(rows, len(like)), *like.shape[1:]), dtype=like.dtype)

    def add(self, piece: np.ndarray, places: np.ndarray | None = None) -> None:
        """Add the rows of ``piece``: at ``places`` below ``rows``, or after those that are there.

        Raises:
            TypeError: it has another number of dimensions, or of rows than places.
        """
        piece = np.atleast_1d(piece)
        if places is not None and len(places) != len(piece):
            raise TypeError(f"an array of {len(piece)} rows for {len(places)} samples, which are not in order")
        if piece.ndim != self._whole.ndim:
            raise TypeError(f"arrays of unequal numbers of dimensions: {self._whole.shape} and {piece.shape}")
        start, end = self._rows, self._rows + len(piece)
        rows = len(self._whole)
        if end > rows:
            rows = max(end, rows + rows // 2)
        sizes = tuple(max(pair) for pair in zip(self._whole.shape[1:], piece.shape[1:], strict=True))
        dtype = np.result_type(self._whole.dtype, piece.dtype)
        if (rows, *sizes) != self._whole.shape or dtype != self._whole.dtype:
            before = self._whole if places is not None else self._whole[:start]
            self._whole = np.empty((rows, *sizes), dtype=dtype)
            self._write(before, slice(0, len(before)))
        self._write(piece, slice(start, end) if places is None else places)
        self._rows = end

    def _write(self, piece: np.ndarray, places: slice | np.ndarray) -> None:
        if piece.shape[1:] != self._whole.shape[1:]:
            self._whole[places] = np.asarray(PADDING).astype(self._whole.dtype)
        self._whole[(places, *(slice(0, size) for size in piece.shape[1:]))] = piece

    def result(self) -> np.ndarray:
        """All rows. Nothing may be added afterwards."""
        return self._whole[: self._rows]


class Kept:
    """One kind of result over all rounds: on the device first, in host memory after :meth:`to_host`.

    Args:
        join: one structure of whole arrays at the end, instead of a list with an entry for each round.
        samples_in_lists: see :func:`ds_trainer.training.evaluation.nested.joined`.
        rows: how many samples there will be, where that is known.
    """

    def __init__(self, join: bool, samples_in_lists: bool, rows: int = 0) -> None:
        self._join = join
        self._samples_in_lists = samples_in_lists
        self._rows = rows
        self._on_device: list[tuple[Any, np.ndarray | None]] = []
        self._on_host: list[Any] = []
        self._growing: Any = None

    def add(self, piece: Any, places: np.ndarray | None = None) -> None:
        """Add what a round gave; None for nothing. ``places``: of its samples in the result, where not in order."""
        if piece is not None:
            self._on_device.append((piece, places))

    def to_host(self) -> None:
        """Bring what has been added since to host memory."""
        waiting, self._on_device = self._on_device[::-1], []
        while waiting:
            tree, places = waiting.pop()  # a round is let go of as soon as it is written
            piece = on_host(tree)
            if not self._join or self._samples_in_lists:
                self._on_host.append(piece)
                continue
            with _in_words():
                if self._growing is None:
                    self._growing = map_leaves(self._begun, piece)
                _grow(self._growing, piece, places)

    def result(self) -> Any:
        """Everything, as numpy arrays; None where nothing was added."""
        self.to_host()
        if self._growing is not None:
            return map_leaves(lambda leaf: leaf.result(), self._growing)
        if not self._on_host or not self._join:
            return self._on_host or None
        with _in_words():
            return joined(self._on_host, samples_in_lists=True)

    def _begun(self, leaf: Any) -> GrowingArray:
        if not isinstance(leaf, np.ndarray):
            raise TypeError(f"values of type {_name(leaf)} cannot be joined")
        return GrowingArray(leaf, self._rows)


def _grow(growing: Any, piece: Any, places: np.ndarray | None) -> None:
    """Add the arrays of ``piece`` to those of ``growing``, structure by structure.

    Raises:
        TypeError: their structures differ.
    """
    if isinstance(growing, GrowingArray) and isinstance(piece, np.ndarray):
        growing.add(piece, places)
        return
    if _name(growing) != _name(piece):
        raise TypeError(f"some batches have a {_name(growing)} where others have a {_name(piece)}")
    if isinstance(growing, Mapping):
        if set(growing) != set(piece):
            raise TypeError(f"batches have dicts of unequal contents: {sorted(growing)} and {sorted(piece)}")
        for key, value in growing.items():
            _grow(value, piece[key], places)
    elif growing is not None:
        if len(growing) != len(piece):
            raise TypeError(f"batches have a {_name(growing)} of unequal contents: {len(growing)} and {len(piece)}")
        for inner, part in zip(growing, piece, strict=True):
            _grow(inner, part, places)


def _name(value: Any) -> str:
    return "array" if isinstance(value, (GrowingArray, np.ndarray)) else type(value).__name__


@contextmanager
def _in_words() -> Iterator[None]:
    """Says what to do where outputs cannot be joined."""
    try:
        yield
    except TypeError as error:
        raise ConfigError(
            f"The outputs of the batches of an evaluation cannot be joined: {error}. Set "
            "eval_do_concat_batches=False to get a list of batches, or name such outputs in ignore_keys."
        ) from error

"""``DocumentRuns``: the documents and the padding of packed rows, as runs of equal tokens.

What depends on documents is proportional to their number, and not to the tokens of a row: a rank that holds a part of a
row holds nothing of the whole. The number of each token exists for the queries and keys of a masked block only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class DocumentRuns:
    """Runs of tokens of one document that all are padding, or all are not. Tensors are on the host.

    Tokens with equal numbers attend to each other, also in runs with others in between. Padding that nobody may attend
    to is, as a key, of a document that no query has.

    Args:
        rows, length: number of sequences, and tokens of each.
        starts: int64 ``[runs]``, ascending: the first token of each run, counted from the beginning of the first
            sequence on. Each sequence begins with a run of its own.
        numbers: int64 ``[runs]``, the document of each run.
        valid: bool ``[runs]``, false for padding. None without padding.
    """

    rows: int
    length: int
    starts: torch.Tensor
    numbers: torch.Tensor
    valid: torch.Tensor | None = None

    @classmethod
    def of(cls, documents: torch.Tensor | None, valid: torch.Tensor | None = None) -> DocumentRuns | None:
        """The runs in the numbers of all tokens; None if neither argument is given.

        Args:
            documents: ``[rows, length]`` int64, the document of each token; None if each sequence is one document.
            valid: ``[rows, length]`` bool, false for padding; None without padding.

        Raises:
            ValueError: the arguments have different shapes.
        """
        given = [tensor for tensor in (documents, valid) if tensor is not None]
        if not given:
            return None
        if any(tensor.shape != given[0].shape for tensor in given):
            raise ValueError(f"documents and valid have the shapes {[list(tensor.shape) for tensor in given]}")
        rows, length = given[0].shape
        begins = torch.zeros(rows, length, dtype=torch.bool)
        begins[:, 0] = True
        for tensor in given:
            begins[:, 1:] |= tensor[:, 1:] != tensor[:, :-1]
        row, token = begins.nonzero(as_tuple=True)
        numbers = torch.zeros(len(row), dtype=torch.int64) if documents is None else documents[row, token]
        return cls(rows, length, row * length + token, numbers, None if valid is None else valid[row, token])

    def valid_at(self, tokens: torch.Tensor) -> torch.Tensor:
        """Whether the tokens at these positions of each sequence are no padding: bool ``[rows, positions]``."""
        if self.valid is None:
            return torch.ones(self.rows, len(tokens), dtype=torch.bool)
        return self.valid[self._runs_at(tokens, self.starts)]

    # -- numbers of single tokens -------------------------------------------------------------------------------------

    def same(self, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> torch.Tensor:
        """Whether the queries ``[first, last)`` of each sequence and the keys ``[first, last)`` are of one document.

        Bool ``[rows, queries, keys]``, created on ``device`` without a synchronization.
        """
        starts, of_queries, of_keys = self._on_device(device)
        query, key = (
            numbers[self._runs_at(torch.arange(*tokens, device=device), starts)]
            for tokens, numbers in ((queries, of_queries), (keys, of_keys))
        )
        return query[:, :, None] == key[:, None, :]

    def _runs_at(self, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """The runs of the tokens at these positions of each sequence: int64 ``[rows, positions]``."""
        first = torch.arange(self.rows, device=tokens.device)[:, None] * self.length
        return torch.searchsorted(starts, first + tokens, right=True) - 1

    def _on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Starts, and the numbers of the runs as queries and as keys; copied once, asynchronously."""
        if device not in self._copies:
            tensors = [self.starts, self.numbers, torch.from_numpy(self._keys[:-1])]
            if device.type == "cuda":
                tensors = [tensor.pin_memory() for tensor in tensors]
            starts, of_queries, of_keys = (tensor.to(device, non_blocking=True) for tensor in tensors)
            self._copies[device] = starts, of_queries, of_keys
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return {}

    # -- ranges of tokens ---------------------------------------------------------------------------------------------

    def share(self, chunk: int) -> torch.Tensor:
        """Whether a chunk of ``chunk`` queries and one of keys may share a document: bool ``[chunks, chunks]``.

        False where :meth:`compare` of them, or of any parts of them, would be None.
        """
        first = np.arange(0, self.length, chunk)
        runs = self._runs_in(first, first + chunk)
        lowest, highest = _least(self._queries, runs), _greatest(self._queries, runs)
        lowest_valid, highest_key = _least(self._valid_keys, runs), _greatest(self._keys, runs)
        apart = (highest[:, :, None] < lowest_valid[:, None]) | (highest_key[:, None] < lowest[:, :, None])
        return torch.from_numpy(~apart.all(0))

    def compare(self, queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]]) -> bool | None:
        """Whether all of these queries and keys share one document in each sequence; None if no pair does.

        Args:
            queries, keys: ranges ``[first, last)`` of positions, none of them empty.
        """
        of_queries, of_keys = (self._runs_in(*np.array(tokens).T) for tokens in (queries, keys))
        lowest, highest = _least(self._queries, of_queries).min(1), _greatest(self._queries, of_queries).max(1)
        highest_key = _greatest(self._keys, of_keys).max(1)
        if ((highest < _least(self._valid_keys, of_keys).min(1)) | (highest_key < lowest)).all():
            return None
        if (lowest != highest).any() or (highest != highest_key).any():
            return False
        return bool((lowest == _least(self._keys, of_keys).min(1)).all())

    def _runs_in(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """First run, and the one after the last, of each sequence in each range of tokens: ``[rows, ranges, 2]``."""
        row, starts = np.arange(self.rows)[:, None] * self.length, self._starts
        return np.stack([starts.searchsorted(row + first, "right") - 1, starts.searchsorted(row + last)], -1)

    @cached_property
    def _starts(self) -> np.ndarray:
        return self.starts.numpy()

    # Numbers of the runs, with one more at the end, since a range may end there.

    @cached_property
    def _queries(self) -> np.ndarray:
        return np.append(self.numbers.numpy(), 0)

    @cached_property
    def _keys(self) -> np.ndarray:
        return self._with_padding_as(int(self.numbers.min()) - 1)

    @cached_property
    def _valid_keys(self) -> np.ndarray:
        return self._with_padding_as(int(self.numbers.max()) + 1)

    def _with_padding_as(self, number: int) -> np.ndarray:
        if self.valid is None:
            return self._queries
        return np.append(self.numbers.masked_fill(~self.valid, number).numpy(), 0)


def _least(numbers: np.ndarray, runs: np.ndarray) -> np.ndarray:
    # Every second result is that of a range: the others are of what lies between two.
    return np.minimum.reduceat(numbers, runs.ravel())[::2].reshape(runs.shape[:2])


def _greatest(numbers: np.ndarray, runs: np.ndarray) -> np.ndarray:
    return np.maximum.reduceat(numbers, runs.ravel())[::2].reshape(runs.shape[:2])

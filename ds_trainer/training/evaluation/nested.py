"""Nested outputs of models: tensors in tuples, lists and dicts of any depth; concatenated, and copied to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

PADDING = -100
"""Pads rows of unequal length where they are concatenated, as in Hugging Face's Trainer."""


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to everything in it except tuples, lists, mappings and None.

    Any kind of tuple becomes a tuple, any kind of mapping (``ModelOutput``) a dict.
    """
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, value) for value in tree)
    if isinstance(tree, list):
        return [map_leaves(function, value) for value in tree]
    return function(tree)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of ``tree``, in the order of :func:`map_leaves`."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return leaves


def detached(tree: Any) -> Any:
    """``tree`` with detached tensors."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


def to_numpy(tree: Any) -> Any:
    """``tree`` with numpy arrays for tensors; bfloat16, which numpy lacks, becomes float32."""
    return map_leaves(_array, tree)


def _array(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).cpu().numpy()


def concatenate(pieces: Sequence[Any], samples_in_lists: bool = False) -> Any:
    """Concatenate the arrays (or tensors) of ``pieces`` along their first dimension, leaf by leaf.

    If arrays differ in a later dimension, all are padded there with :data:`PADDING` on the right. A scalar counts as
    one row.

    Args:
        pieces: trees of equal structure, at least one.
        samples_in_lists: a list is a sequence of samples to be concatenated, not a structure; leaves that are not
            arrays become a list.

    Raises:
        TypeError: the structures differ, or there are leaves that cannot be concatenated.
    """
    first = pieces[0]
    if first is None and all(piece is None for piece in pieces):
        return None
    if isinstance(first, Mapping):
        _check_structure(pieces, Mapping, [set(piece) for piece in pieces if isinstance(piece, Mapping)])
        return {key: concatenate([piece[key] for piece in pieces], samples_in_lists) for key in first}
    if isinstance(first, list) and samples_in_lists:
        _check_structure(pieces, list, [])
        return [sample for piece in pieces for sample in piece]
    if isinstance(first, (tuple, list)):
        kind = type(first)
        _check_structure(pieces, kind, [len(piece) for piece in pieces if isinstance(piece, kind)])
        return kind(concatenate(list(parts), samples_in_lists) for parts in zip(*pieces, strict=True))
    if isinstance(first, torch.Tensor):
        _check_structure(pieces, torch.Tensor, [])
        return _joined_tensors(list(pieces))
    if isinstance(first, np.ndarray):
        _check_structure(pieces, np.ndarray, [])
        return _joined_arrays(list(pieces))
    if samples_in_lists:
        return list(pieces)
    raise TypeError(
        f"values of type {', '.join(sorted({type(piece).__name__ for piece in pieces}))} cannot be concatenated"
    )


def _check_structure(pieces: Sequence[Any], kind: type, shapes: list[Any]) -> None:
    others = sorted({type(piece).__name__ for piece in pieces if not isinstance(piece, kind)})
    if others:
        raise TypeError(f"some batches have a {type(pieces[0]).__name__} where others have a {', '.join(others)}")
    if any(shape != shapes[0] for shape in shapes):
        raise TypeError(f"batches have a {type(pieces[0]).__name__} with different contents: {shapes[:4]}")


def _common_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that can hold all rows of arrays of these shapes."""
    if len({len(shape) for shape in shapes}) > 1:
        raise TypeError(
            f"arrays with different numbers of dimensions: {', '.join(str(s) for s in sorted(set(shapes)))}"
        )
    return (sum(shape[0] for shape in shapes), *(max(sizes) for sizes in list(zip(*shapes, strict=True))[1:]))


def _joined_tensors(pieces: list[torch.Tensor]) -> torch.Tensor:
    pieces = [torch.atleast_1d(piece) for piece in pieces]
    shape = _common_shape([tuple(piece.shape) for piece in pieces])
    if all(piece.shape[1:] == shape[1:] for piece in pieces):
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    whole = pieces[0].new_full(shape, PADDING)
    start = 0
    for piece in pieces:
        whole[(slice(start, start + len(piece)), *(slice(0, size) for size in piece.shape[1:]))] = piece
        start += len(piece)
    return whole


def _joined_arrays(pieces: list[np.ndarray]) -> np.ndarray:
    pieces = [np.atleast_1d(piece) for piece in pieces]
    shape = _common_shape([piece.shape for piece in pieces])
    if all(piece.shape[1:] == shape[1:] for piece in pieces):
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    whole = np.full(shape, PADDING, dtype=np.result_type(*(piece.dtype for piece in pieces)))
    start = 0
    for piece in pieces:
        whole[(slice(start, start + len(piece)), *(slice(0, size) for size in piece.shape[1:]))] = piece
        start += len(piece)
    return whole


def plain_numbers(value: Any) -> Any:
    """``value`` with Python numbers for scalars of numpy and torch, for JSON."""
    if isinstance(value, Mapping):
        return {key: plain_numbers(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(plain_numbers(entry) for entry in value)
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value

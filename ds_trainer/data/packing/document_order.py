"""The order of the documents in a packed row that gives all context-parallel ranks about the same attention work.

In zig-zag order (:class:`ds_trainer.parallel.sequence_plan.SequencePlan`) rank ``i`` of ``cp`` holds the chunks ``i``
and ``2 * cp - 1 - i`` of a row. One long document is balanced by that, and so are many short ones. A document as long
as a chunk is not: its work grows with the square of its length, and one rank may have most of it. The documents of a
row can stand in any order, so some orders are tried, and the one whose busiest rank has least to do is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TRIED = 96


def balanced_order(lengths: Sequence[int], row: int, cp: int, causal: bool = True) -> list[int]:
    """Indices of the documents in the order in which they stand in the row. Depends on the arguments alone.

    Args:
        lengths: tokens of each document; room at the end of the row is padding, which attends to itself.
        row: tokens of the row.
        cp: context-parallel ranks.
        causal: whether tokens attend to earlier tokens only.
    """
    count = len(lengths)
    best = np.arange(count)
    if cp == 1 or count < 2:
        return best.tolist()
    sizes, draws = np.asarray(lengths, dtype=np.int64), np.random.default_rng(0)
    least = busiest_rank(sizes, row, cp, causal)
    bound = 1.02 * _mean_work(sizes, row, cp, causal)
    for trial in range(_TRIED):
        if least <= bound:
            break
        if trial < _TRIED // 3:
            order = draws.permutation(count)
        else:  # improve the best order by moving one document
            order = best.copy()
            source, target = draws.integers(count, size=2)
            order[source], order[target] = order[target], order[source]
        work = busiest_rank(sizes[order], row, cp, causal)
        if work < least:
            best, least = order, work
    return best.tolist()


def busiest_rank(lengths: np.ndarray, row: int, cp: int, causal: bool = True) -> float:
    """Pairs of tokens that the rank with most of them computes, if the documents stand in the order of ``lengths``."""
    sizes = np.append(lengths, row - lengths.sum()).astype(np.float64)
    ends = sizes.cumsum()
    done = np.append(0.0, _pairs(sizes, sizes, causal).cumsum())
    borders = np.arange(2 * cp + 1) * (row / (2 * cp))
    document = np.minimum(np.searchsorted(ends, borders, side="right"), len(sizes) - 1)
    inside = borders - (ends - sizes)[document]
    before = done[document] + _pairs(inside, sizes[document], causal)
    of_chunks = np.diff(before)
    return float((of_chunks[:cp] + of_chunks[::-1][:cp]).max())


def _mean_work(lengths: np.ndarray, row: int, cp: int, causal: bool) -> float:
    sizes = np.append(lengths, row - lengths.sum()).astype(np.float64)
    return float(_pairs(sizes, sizes, causal).sum()) / cp


def _pairs(queries: np.ndarray, keys: np.ndarray, causal: bool) -> np.ndarray:
    """Pairs of the first ``queries`` tokens of a document of ``keys`` tokens with the tokens that they attend to."""
    result: np.ndarray = queries * (queries + 1) / 2 if causal else queries * keys
    return result

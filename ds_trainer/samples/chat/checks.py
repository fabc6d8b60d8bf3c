"""Checks of a finished sample, by decoding it: independent of how its labels were made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_trainer.samples.chat.tokens import IGNORED
from ds_trainer.samples.chat.turns import Span


def trained_runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """(first, last + 1) of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (labels != IGNORED).astype(np.int8), [0]))))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]


def doubled_beginning(ids: Sequence[int] | np.ndarray, bos: int | None) -> bool:
    """Whether the sample begins with two beginning-of-text tokens."""
    return bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos


def mask_problem(tokenizer: Any, ids: np.ndarray, labels: np.ndarray, text: str, spans: Sequence[Span]) -> str | None:
    """What is wrong with the labels of a sample, or None.

    Args:
        tokenizer: decodes.
        ids: token ids, shape [tokens].
        labels: of the same shape, -100 where nothing is trained on.
        text: the rendered text.
        spans: the characters of ``text`` that are to be trained on, ascending.
    """
    trained = labels != IGNORED
    if not np.array_equal(ids[trained], labels[trained]):
        return "a label differs from its token"
    joined = _joined(spans)
    runs = trained_runs(labels)
    if len(runs) != len(joined):
        return f"{len(runs)} parts are trained on, not {len(joined)}"
    for (first, last), span in zip(runs, joined, strict=True):
        expected = text[span.start : span.end]
        decoded = tokenizer.decode(ids[first:last].tolist())
        if decoded != expected and not _same_in_context(tokenizer, ids, first, last, expected):
            return f"{_ends(decoded)} is trained on, not {_ends(expected)}"
    return None


def _same_in_context(tokenizer: Any, ids: np.ndarray, first: int, last: int, expected: str) -> bool:
    """Whether tokens ``first`` to ``last`` mean ``expected``, for tokenizers that change a text or treat its beginning
    differently (SentencePiece adds a space, and drops it when it decodes).
    """
    before, whole = tokenizer.decode(ids[:first].tolist()), tokenizer.decode(ids[:last].tolist())
    normalized = tokenizer.decode(tokenizer.encode(expected, add_special_tokens=False))
    within = whole[len(before) :] if whole.startswith(before) else None
    return within in (expected, normalized) or tokenizer.decode(ids[first:last].tolist()) == normalized


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Spans without gaps between them as one."""
    joined: list[Span] = []
    for span in spans:
        if joined and span.start <= joined[-1].end:
            joined[-1] = Span(joined[-1].start, max(span.end, joined[-1].end))
        else:
            joined.append(span)
    return joined


def _ends(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}")

"""Text to token ids, such that given positions of the text are borders between tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

IGNORED = -100


class CutToken(ValueError):
    """A token lies across a border, and tokenizing the text in two parts gives another text."""

    def __init__(self, token: str, position: int) -> None:
        super().__init__(f"the token {token!r} lies across the border at character {position}")


class Tokens(NamedTuple):
    """Token ids, the index of the first token after each border, and whether the text was tokenized in parts."""

    ids: list[int]
    borders: list[int]
    in_parts: bool


def special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Matches every special and added token; longer ones first."""
    names = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    names = {str(name) for name in names if str(name).strip()}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def beginning_tokens(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before a text (mostly one, or none), where no chat template does."""
    with_special, without = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    if with_special == without:
        return []
    starts = range(len(with_special) - len(without) + 1)
    return list(with_special[: next((n for n in starts if with_special[n : n + len(without)] == without), 0)])


def tokenize(tokenizer: Any, text: str, borders: Sequence[int]) -> Tokens:
    """Token ids of ``text`` in which each of ``borders`` (characters, ascending) is a border between tokens.

    Where a token would lie across a border, the parts on both sides are tokenized separately. That is also what happens
    when the model generates: the prompt is tokenized without its answer.

    Raises:
        CutToken: the parts do not decode to the text of the whole (tokenizers that add a space to a beginning).
    """
    ids, ends = _with_ends(tokenizer, text)
    places = [_border(ends, text, border) for border in borders]
    if None not in places:
        return Tokens(ids, [index for index in places if index is not None], False)
    cuts = [border for border, index in zip(borders, places, strict=True) if index is None]
    pieces: list[list[int]] = []
    begins: dict[int, int] = {}
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        begins[start] = sum(len(piece) for piece in pieces)
        pieces.append(_with_ends(tokenizer, text[start:end])[0])
    parts = [token for piece in pieces for token in piece]
    if tokenizer.decode(parts) != tokenizer.decode(ids):
        across = int(np.searchsorted(ends, cuts[0], side="right"))
        raise CutToken(tokenizer.decode(ids[across : across + 1]), cuts[0])
    indices = []
    for border in borders:
        start = max(begin for begin in begins if begin <= border)
        if start == border:
            indices.append(begins[start])
            continue
        end = min([cut for cut in cuts if cut > border], default=len(text))
        inner = _with_ends(tokenizer, text[start:end])[1]
        index = _border(inner, text[start:end], border - start)
        if index is None:
            raise CutToken(text[border - 1 : border + 1], border)
        indices.append(begins[start] + index)
    return Tokens(parts, indices, True)


def _with_ends(tokenizer: Any, text: str) -> tuple[list[int], np.ndarray]:
    """Token ids, and for each the character at which it ends."""
    if not getattr(tokenizer, "is_fast", False):
        ids = tokenizer.encode(text, add_special_tokens=False)
        return list(ids), _decoded_ends(tokenizer, ids, text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = np.asarray([end for _, end in encoded["offset_mapping"]], dtype=np.int64)
    return list(encoded["input_ids"]), ends


def _decoded_ends(tokenizer: Any, ids: Sequence[int], text: str) -> np.ndarray:
    """Ends by decoding ever longer beginnings, for tokenizers without offsets; -1 where the text is no beginning."""
    ends = np.full(len(ids), -1, dtype=np.int64)
    for count in range(1, len(ids) + 1):
        decoded = tokenizer.decode(ids[:count])
        if text.startswith(decoded):
            ends[count - 1] = len(decoded)
    return ends


def _border(ends: np.ndarray, text: str, border: int) -> int | None:
    """The index of the first token after character ``border``; None if a token lies across it."""
    if border == 0:
        return 0
    before = np.flatnonzero(ends == border)
    if before.size:
        return int(before[-1]) + 1
    return len(ends) if border >= len(text) else None

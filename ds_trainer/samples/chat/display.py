"""Samples as text for a terminal: what is trained on stands out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TextIO

import numpy as np

from ds_trainer.samples.chat.tokens import IGNORED

_TRAINED, _MASKED, _RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"
# Data could move the cursor or clear the screen: control characters are shown as their symbols.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_CONTROLS |= {code: 0xFFFD for code in range(0x80, 0xA0)}
BEGIN, END = "⟦", "⟧"


def uses_color(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to color what is written to ``stream``: a terminal, and NO_COLOR (no-color.org) is not set."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def sample_text(tokenizer: Any, ids: np.ndarray, labels: np.ndarray, color: bool) -> str:
    """The text of a sample: trained parts in green and the rest dim, or trained parts in ⟦ ⟧.

    Args:
        tokenizer: decodes.
        ids: token ids, shape [tokens].
        labels: a number for each of them, -100 where nothing is trained on.
        color: whether to use the colors of a terminal.
    """
    text = ""
    for trained, part in parts(ids, labels):
        decoded = tokenizer.decode(part.tolist()).translate(_CONTROLS)
        if color:
            text += f"{_TRAINED if trained else _MASKED}{decoded}{_RESET}"
        else:
            text += f"{BEGIN}{decoded}{END}" if trained else decoded
    return text


def token_lines(tokenizer: Any, ids: np.ndarray, labels: np.ndarray, color: bool) -> list[str]:
    """One line per token: position, id, whether it is trained on, text."""
    lines = []
    for position, (token, label) in enumerate(zip(ids.tolist(), labels.tolist(), strict=True)):
        trained = label != IGNORED
        line = f"{position:>6} {token:>7} {'trained' if trained else '-':<8} {tokenizer.decode([token])!r}"
        lines.append(f"{_TRAINED if trained else _MASKED}{line}{_RESET}" if color else line)
    return lines


def parts(ids: np.ndarray, labels: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """Runs of tokens, and whether they are trained on.

    Args:
        ids: token ids, shape [tokens].
        labels: a number for each of them, -100 where nothing is trained on.
    """
    trained = labels != IGNORED
    edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(ids)]
    for start, end in pairwise(edges):
        if end > start:
            yield bool(trained[start]), ids[start:end]

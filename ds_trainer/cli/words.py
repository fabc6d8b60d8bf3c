"""Sorting the words of a command line before argparse sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def without_local_rank(words: Sequence[str]) -> list[str]:
    """``words`` without ``--local_rank=N``, which the ``deepspeed`` launcher puts before them.

    The launcher says the same through LOCAL_RANK in the environment, where the engine reads it.
    """
    return [word for word in words if not re.fullmatch(r"--local[_-]rank=\d+", word)]


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """``words`` without, and the words of, overrides of the recipe: ``--a.b value`` and ``--a.b=value``."""
    others: list[str] = []
    overrides: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        is_override = word.startswith("--") and "." in word.partition("=")[0]
        takes_next = is_override and "=" not in word and position + 1 < len(words)
        takes_next = takes_next and not words[position + 1].startswith("--")
        size = 2 if takes_next else 1
        (overrides if is_override else others).extend(words[position : position + size])
        position += size
    return others, overrides

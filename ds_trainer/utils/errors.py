"""The exception for everything that a user can get wrong, and suggestions for misspelled names.

All problems that can be found before a process group exists are reported at once; each names the value, its source and
the remedy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class ConfigError(ValueError):
    """The request cannot work. ``problems`` has one complete sentence for each thing to change."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            numbered = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))
            message = f"{len(self.problems)} problems:\n{numbered}"
        super().__init__(message)


def listed(values: Iterable[object], most: int = 16, separator: str = ", ") -> str:
    """``values`` with commas; of more than ``most`` the first ones, and the number of the others."""
    texts = [str(value) for value in values]
    shown = separator.join(texts[:most])
    return shown if len(texts) <= most else f"{shown}{separator.rstrip(', ')} and {len(texts) - most:,} more"


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """``" Did you mean 'x'?"`` for the best match of ``name``, or an empty string if there is none.

    Args:
        name: as given.
        candidates: the valid names. One that ``name`` abbreviates by its initials (``lr``: ``learning_rate``) is
            preferred to one that is spelled similarly.
        cutoff: minimum similarity, 0 to 1.
    """
    candidates = list(candidates)
    short = name.lstrip("-")
    matches = [candidate for candidate in candidates if len(short) > 1 and _initials(candidate) == short]
    matches = matches or difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def _initials(name: str) -> str:
    """``--arguments.learning_rate``: ``lr``."""
    return "".join(word[0] for word in re.split("[_-]", name.lstrip("-").rpartition(".")[2]) if word)

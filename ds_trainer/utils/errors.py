"""The one exception for everything a user can get wrong, and the "did you mean" helper.

Rule 4 of the architecture: everything that can be refused is refused before a process group exists, all problems at
once, each naming the value, where it came from and what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """What was asked for cannot work. ``problems`` holds one complete sentence for each thing to change."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            numbered = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))
            message = f"{len(self.problems)} problems:\n{numbered}"
        super().__init__(message)


def did_you_mean(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """``" Did you mean 'x'?"`` for the nearest of ``candidates``, or an empty string when none is near: alike by
    ``cutoff``, 0 to 1."""
    near = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""

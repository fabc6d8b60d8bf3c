"""Bad lines: all are found before any is reported, so that a file is repaired once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from ds_trainer.utils.errors import ConfigError

LISTED = 20
"""How many bad lines a message lists; the others are counted."""

Policy = Literal["error", "skip"]


class BadLine(NamedTuple):
    """What is wrong with a line, a row or a whole file.

    Attributes:
        where: ``file:line``, ``file, row N``, or the file.
        reason: why it cannot be used.
        whole_file: the rest of the file cannot be read; that is never skipped.
    """

    where: str
    reason: str
    whole_file: bool = False


class BadRecord(ValueError):
    """A row is no valid sample; the message is the reason."""


class BadLines:
    """Collects bad lines while sources are read.

    Args:
        policy: ``error``: :meth:`check` refuses them; ``skip``: they are counted and left out.
    """

    def __init__(self, policy: Policy = "error") -> None:
        self.policy = policy
        self.count = 0
        self._first: list[BadLine] = []
        self._files: list[BadLine] = []

    def add(self, bad: BadLine) -> None:
        """Count ``bad``, and list it if it is one of the first."""
        self.count += 1
        if bad.whole_file:
            self._files.append(bad)
        elif len(self._first) < LISTED:
            self._first.append(bad)

    def problems(self) -> list[str]:
        """The bad lines that the policy refuses, one sentence each: the first :data:`LISTED`, and how many follow."""
        listed: Iterable[BadLine] = self._files if self.policy == "skip" else [*self._first, *self._files][:LISTED]
        problems = [f"{bad.where}: {bad.reason}{'' if bad.reason.endswith('?') else '.'}" for bad in listed]
        if self.policy == "error" and self.count > len(problems):
            problems.append(f"{self.count - len(problems):,} more bad lines follow, {self.count:,} in all.")
        if self.policy == "error" and len(problems) > len(self._files):
            problems[-1] += " Correct them, or set data.bad_lines to skip, which counts them and leaves them out."
        return problems

    def check(self) -> None:
        """Refuse the bad lines if the policy asks for it.

        Raises:
            ConfigError: lists them.
        """
        if problems := self.problems():
            raise ConfigError(problems)

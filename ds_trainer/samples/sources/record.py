"""One sample of a source as it was read, before tokenization; and bad lines, all of which are found before any is
reported, so that a file is repaired once.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ds_trainer.utils.errors import ConfigError, ProblemGroups


class Record(NamedTuple):
    """A sample in one of the standard dataset formats of TRL.

    Attributes:
        source: where it was read: ``file:line``, or ``file, row N``.
        kind: ``text``, ``messages``, ``prompt_completion`` or ``preference``.
        fields: ``text`` has ``{"text": str}``; ``messages`` has ``{"messages": [{"role", "content", ...}]}`` and
            optionally ``"tools"``; ``prompt_completion`` has ``"prompt"`` and ``"completion"`` (text or messages);
            ``preference`` has ``"chosen"``, ``"rejected"`` and optionally ``"prompt"``. Any kind may have ``"images"``.
            A message with ``train`` false is not trained on, nor is a text part with it; a text with ``"spans"`` is
            trained on in these characters (pairs, the second one exclusive) alone.
        unread: keys of the sample that no rule has read, as ``id`` or ``messages[].id``.
    """

    source: str
    kind: str
    fields: dict[str, Any]
    unread: tuple[str, ...] = ()


_MOST_PLACES = 10_000

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
        self._lines, self._files = ProblemGroups(), ProblemGroups()
        self._places: set[str] = set()

    @property
    def count(self) -> int:
        """Number of bad lines and bad files."""
        return self._lines.count + self._files.count

    def add(self, bad: BadLine) -> None:
        """Count ``bad``."""
        (self._files if bad.whole_file else self._lines).add(bad.where, bad.reason)
        if len(self._places) < _MOST_PLACES:
            self._places.add(bad.where)

    def __contains__(self, problem: str) -> bool:
        """Whether ``problem``, a sentence that begins with a place, is about one of the bad lines."""
        return problem.partition(": ")[0] in self._places

    def problems(self) -> list[str]:
        """The bad lines that the policy refuses, one sentence for each kind."""
        problems = self._files.sentences()
        if self.policy == "error" and self._lines.count:
            problems = [*self._lines.sentences(), *problems]
            problems[-1] += " Correct them, or set data.bad_lines to skip, which counts them and leaves them out."
        return problems

    def check(self) -> None:
        """Refuse the bad lines if the policy asks for it.

        Raises:
            ConfigError: lists them.
        """
        if problems := self.problems():
            raise ConfigError(problems)

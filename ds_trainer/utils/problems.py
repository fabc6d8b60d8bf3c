"""``Problems``: collects everything that is wrong with a run, so that one error lists all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ds_trainer.utils.errors import ConfigError


class Problems:
    """The problems found so far, one sentence each, in the order in which they were found.

    The checks of arguments, configuration, model and data share one collector. Each check runs as far as it can, and
    :meth:`raise_if_any` at the end raises a single error. A problem that several checks find is listed once.
    """

    def __init__(self, problems: Iterable[str] = ()) -> None:
        self._sentences = dict.fromkeys(problems)

    def __len__(self) -> int:
        return len(self._sentences)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sentences)

    def add(self, problem: str) -> None:
        """Add one problem: a complete sentence that names the value, where it came from and what to change."""
        self._sentences.setdefault(problem)

    def extend(self, problems: Iterable[str]) -> None:
        """Add several problems."""
        for problem in problems:
            self.add(problem)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Run a check that raises: add the problems of its :class:`ConfigError` instead of raising it.

        The rest of the block is skipped at the first such error. Any other exception passes through.
        """
        try:
            yield
        except ConfigError as error:
            self.extend(error.problems)

    def raise_if_any(self) -> None:
        """Raise one error with all problems, if there are any.

        Raises:
            ConfigError: with all problems.
        """
        if self._sentences:
            raise ConfigError(self)

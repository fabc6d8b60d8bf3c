"""The exception for everything that a user can get wrong, and suggestions for misspelled names.

All problems that can be found before a process group exists are reported at once; each names the value, its source and
the remedy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ds_trainer.utils.printable import shown
from ds_trainer.utils.units import counted

_MOST = 20
"""How many kinds of problems a message lists; the others are counted."""
_MOST_ALIKE, _SHOWN_LINES = 5, 3
_LONG = re.compile(r"(\S{300})\S{700,}(?=\S{100})")  # the middle of what is too long to be read
_PLACE = re.compile(r"(?P<file>[^\n]*?)(?P<kind>:|, row )(?P<number>\d+)")
_VARIES = re.compile(r"""\d+|'[^'\n]*'|"[^"\n]*"|(?<=key )\S+""")  # between two problems of one kind


class ConfigError(ValueError):
    """The request cannot work. ``problems`` has one complete sentence for each thing to change.

    The message groups problems of one kind, and has no secrets and no control characters.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        listed = self.problems
        if len(listed) > _MOST:
            groups = ProblemGroups()
            for problem in listed:
                place = re.match(rf"{_PLACE.pattern}: ", problem)
                where = problem[: place.end("number")] if place else ""
                groups.add(where, problem[place.end() :] if place else problem)
            listed = groups.sentences()
        if len(listed) == 1:
            message = listed[0]
        else:
            numbered = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(listed, 1))
            message = f"{counted(len(self.problems), 'problem')}:\n{numbered}"
        super().__init__(shown(_LONG.sub(r"\1...", message)))


def text_of(error: BaseException) -> str:
    """``str(error)``, also of an exception of the user whose text cannot be made: it still has to be reported."""
    try:
        return str(error)
    except Exception:
        return f"<no text: {type(error).__name__}.__str__ failed>"


class _Group:
    def __init__(self, where: str, number: str, reason: str) -> None:
        self.where, self.numbers, self.reason = where, [number], reason
        self.count, self.same = 1, True


class ProblemGroups:
    """Problems of one file by what is wrong, so that a thousand lines with one mistake are one sentence.

    Of many that differ in numbers and quoted names only, a few have a sentence of their own.
    """

    def __init__(self) -> None:
        self.count = 0
        self._groups: dict[tuple[str, str], _Group] = {}
        self._alike: dict[tuple[str, str], list[_Group]] = {}

    def add(self, where: str, reason: str) -> None:
        """Count a problem.

        Args:
            where: ``file:line``, ``file, row N``, a file, or nothing.
            reason: a sentence, with or without its full stop.
        """
        self.count += 1
        place = _PLACE.fullmatch(where)
        file, number = (place["file"], place["number"]) if place else (where, "")
        file += place["kind"] if place else ""
        group = self._groups.get((file, reason))
        if group is None:
            alike = self._alike.setdefault((file, _VARIES.sub("#", reason)), [])
            if len(alike) < _MOST_ALIKE and len(self._groups) < _MOST:
                group = self._groups[file, reason] = _Group(where, number, reason)
                alike.append(group)
                return
            if not alike:
                return
            group = alike[0]
        group.count += 1
        group.same = group.same and group.reason == reason
        if len(group.numbers) < _SHOWN_LINES:
            group.numbers.append(number)

    def sentences(self) -> list[str]:
        """A sentence for each kind, and one for those that are not listed."""
        sentences = [_sentence(group) for group in self._groups.values()]
        rest = self.count - sum(group.count for group in self._groups.values())
        return [*sentences, f"{rest:,} more problems follow, {self.count:,} in all."] if rest else sentences


def _sentence(group: _Group) -> str:
    first = f"{group.where}: {group.reason}" if group.where else group.reason
    ended = first if first.endswith(("?", ".")) else f"{first}."
    if group.count == 1:
        return ended
    place = _PLACE.fullmatch(group.where)
    if place is None:
        return f"{ended} (And {group.count - 1:,} more of this kind.)"
    unit = "rows" if place["kind"] != ":" else "lines"
    more = ", ..." if group.count > len(group.numbers) else ""
    lines = f" ({unit} {', '.join(group.numbers)}{more})"
    what, stop, remedy = group.reason.partition(". ")
    alike = "" if group.same else f" like {unit[:-1]} {group.numbers[0]}"
    what = what if stop else what.rstrip(".")
    end = "" if (remedy or what).endswith(("?", ".")) else "."
    return f"{place['file']}: {group.count:,} {unit}{alike}: {what}{lines}{stop}{remedy}{end}"


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
    words = {one: re.split("[_-]", one.lstrip("-").rpartition(".")[2]) for one in candidates}
    # ``lr`` for ``--arguments.learning_rate``
    matches = [one for one in candidates if len(short) > 1 and "".join(word[:1] for word in words[one]) == short]
    matches = matches or difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return f" Did you mean '{matches[0]}'?" if matches else ""


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

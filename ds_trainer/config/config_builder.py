"""``ConfigBuilder``: merges the arguments with the user's DeepSpeed file into one configuration, and notes conflicts.

There are three kinds of values. A value that an *argument* sets is binding: a file with another value is a conflict,
unless it says ``"auto"``. A value that this package *derives* or chooses is a default: the file overrides it. A value
that only the file sets is taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from typing import Any

from ds_trainer.arguments.construction import CheckedArguments
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.compiled import CompiledConfig, Origin, short_dtype
from ds_trainer.config.schema import Schema
from ds_trainer.config.schema_values import AUTO, converted
from ds_trainer.utils.errors import Problems


class ConfigBuilder:
    """A configuration under construction.

    Args:
        args: the arguments, with their sources.
        user: the settings of the user's file by dotted path (:func:`flatten`).
        schema: description of DeepSpeed's configuration.
        problems: collects the conflicts.
        file_wins: whether a conflict leaves the file's value in the configuration, not that of the arguments.

    Attributes:
        uncertain: paths whose value is wrong or unknown, so that nothing follows from it.
        conflicts: whether a value of the file contradicts the arguments.
    """

    def __init__(
        self,
        args: CheckedArguments,
        user: dict[str, Located],
        schema: Schema,
        problems: Problems | None = None,
        file_wins: bool = False,
    ) -> None:
        self.args = args
        self.uncertain: set[str] = set()
        self.conflicts = False
        self._file_wins = file_wins
        self.config = CompiledConfig()
        self.problems = Problems() if problems is None else problems
        self._user = dict(user)
        self.schema = schema

    # -- the user's file ------------------------------------------------------------------------------------------

    def requested(self, path: str) -> Any:
        """The file's value at ``path``; None if it has none or says ``"auto"``."""
        entry = self._user.get(path)
        return None if entry is None or entry.value == AUTO else entry.plain()

    def where(self, path: str) -> str:
        """Source of the file's value at ``path``."""
        return self._user[path].where

    def mentions(self, section: str) -> bool:
        """Whether the file has a value at or below ``section``."""
        return any(path == section or path.startswith(f"{section}.") for path in self._user)

    def first_source(self, section: str) -> str:
        """Source of the file's first value at or below ``section``."""
        return next(e.where for p, e in self._user.items() if p == section or p.startswith(f"{section}."))

    def below(self, section: str) -> list[tuple[str, Located]]:
        """The file's remaining values below ``section``, by the rest of the path."""
        prefix = f"{section}."
        return [(path.removeprefix(prefix), entry) for path, entry in self._user.items() if path.startswith(prefix)]

    def drop(self, path: str) -> Located | None:
        """Remove and return the file's value at ``path``: it is checked elsewhere and not passed on."""
        return self._user.pop(path, None)

    def leave_out(self, path: str) -> None:
        """Take the file's value at ``path``, which is wrong, for ``"auto"``."""
        self._user[path] = Located(AUTO, self.where(path))
        self.uncertain.add(path)

    # -- three kinds of values ------------------------------------------------------------------------------------

    def argument(self, path: str, value: Any, *names: str) -> None:
        """Set ``path`` to ``value``, which the arguments ``names`` decide. Another value in the file is a conflict."""
        given = [name for name in names if self.args.given(name)]
        kind = "argument" if given else "default"
        shown = ", ".join(f"{name}={_show(getattr(self.args, name))}" for name in names)
        source = self.args.where(given[0] if given else names[0])
        self._binding(path, value, Origin(kind, shown, source), f"{shown} ({source})", names)

    def determined(self, path: str, value: Any, name: str, why: str) -> None:
        """Set ``path`` to a value that follows from ``name``, which the run has: another one is a conflict."""
        self._binding(path, value, Origin("derived", why), why, (name,))

    def derive(self, path: str, value: Any, why: str) -> None:
        """Set ``path`` to a value that follows from others, unless the file sets it."""
        self._set_default(path, value, Origin("derived", why))

    def default(self, path: str, value: Any, why: str) -> None:
        """Set ``path`` to this package's default, unless the file sets it."""
        self._set_default(path, value, Origin("default", why))

    def take_the_rest(self) -> None:
        """Take the values that only the file sets. ``"auto"`` at any other key becomes DeepSpeed's default."""
        for path, entry in self._user.items():
            field = self.schema.field(path)
            if entry.value == AUTO and not (field is not None and field.auto_is_a_value):
                if field is None or field.default is None:
                    continue  # without the key, DeepSpeed uses its default
                self.config.set(path, field.default, Origin("default", "DeepSpeed's, for auto", entry.where))
            else:
                self.config.set(path, entry.plain(), Origin("user", "", entry.where))
        self._user.clear()

    def conflict(self, path: str, entry: Located, other: str, *names: str) -> None:
        """Note that the file and the arguments ``names`` contradict each other. ``other`` describes the arguments."""
        self.conflicts = True
        values = entry.plain() if isinstance(entry.value, list) else [entry.plain()]
        if len(values) == len(names):
            agree = f"Set {' and '.join(f'{name}={_show(value)}' for name, value in zip(names, values, strict=True))}"
        else:
            agree = f"Make {' and '.join(names)} agree with it"
        self.problems.add(
            f"{path}={json.dumps(entry.plain())} in {entry.where}, but {other}. {agree}, or write "
            f'"auto" in {entry.where}.'
        )

    def _binding(self, path: str, value: Any, origin: Origin, described: str, names: Sequence[str]) -> None:
        entry = self._user.pop(path, None)
        if entry is not None and entry.value != AUTO and not self._agree(path, entry.plain(), value):
            self.conflict(path, entry, described, *names)
            if self._file_wins:
                value, origin = entry.plain(), Origin("user", "", entry.where)
        self._set(path, value, origin, entry)

    def _agree(self, path: str, one: Any, other: Any) -> bool:
        field = self.schema.field(path)
        if field is not None and field.choices and isinstance(one, str) and isinstance(other, str):
            if field.any_case:
                one, other = one.lower(), other.lower()
            return short_dtype(one) == short_dtype(other)
        return _same(one, other)

    def _set_default(self, path: str, value: Any, origin: Origin) -> None:
        entry = self._user.pop(path, None)
        if entry is not None and entry.value != AUTO:
            self.config.set(path, entry.plain(), Origin("user", "", entry.where))
        else:
            self._set(path, value, origin, entry)

    def _set(self, path: str, value: Any, origin: Origin, entry: Located | None) -> None:
        if entry is not None and entry.value == AUTO:
            origin = Origin(origin.kind, f"{origin.detail}, for auto in {entry.where}", origin.source)
        self.config.set(path, value, origin)


def flatten(root: Located, schema: Schema, without: Container[str] = ()) -> dict[str, Located]:
    """A mapping from dotted path to leaf. Of what is wrong, in ``without``, keys that exist are ``"auto"``.

    Lists, and mappings that DeepSpeed takes as they are, are leaves. Values are those that DeepSpeed converts them to.
    ``null`` is left out, ``"auto"`` at a key that a file must not have, and an older key that asks for nothing.
    """
    return dict(_leaves(root, "", schema, without))


def _leaves(entry: Located, path: str, schema: Schema, without: Container[str]) -> Iterator[tuple[str, Located]]:
    field = schema.field(path) if path else None
    if path in without:
        if field is not None and field.kind != "section" and not (field.replaced_by or field.refused):
            yield schema.canonical(path), Located(AUTO, entry.where)
        return
    is_section = isinstance(entry.value, dict) and entry.value and (field is None or field.kind != "dict")
    if is_section:
        for key, below in entry.value.items():
            yield from _leaves(below, f"{path}.{key}" if path else key, schema, without)
    elif path and entry.value is not None:
        if field is None:
            yield schema.canonical(path), entry
        elif not field.replaced_by and not (entry.value == AUTO and field.refused):
            yield schema.canonical(path), Located(converted(entry.value, field), entry.where)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _show(value: Any) -> str:
    return str(value) if isinstance(value, str) else repr(value)

"""What DeepSpeed's configuration may hold: keys, types, ranges, defaults. Taken from the installed DeepSpeed.

The description is a JSON file that :mod:`ds_trainer.config.schema_build` writes from DeepSpeed's own classes. The one
in this folder belongs to the version that is pinned; for any other installed version it is built once (DeepSpeed is
imported for that, which takes seconds) and kept in the user's cache. So it follows the installation, and costs
milliseconds.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.utils.errors import did_you_mean
from ds_trainer.utils.files import read_json, write_text_atomic

SNAPSHOT = Path(__file__).with_name("deepspeed_schema.json")
_FORMAT = 1  # of the description; part of the name of cached ones
AUTO = "auto"
_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "list": "a list",
    "dict": "a mapping",
    "section": "a mapping",
}


@dataclass(frozen=True)
class Field:
    """One key, or a section of keys (``kind == "section"``).

    Attributes:
        kind: bool, int, float, str, list, dict (taken as it is), any or section.
        nullable: whether ``null`` is allowed.
        default: DeepSpeed's default; None where it has none.
        choices: allowed values, compared without regard to case.
        minimum, maximum: inclusive limits.
        above, below: exclusive limits.
        replaced_by: what to use instead of a deprecated key.
        auto_is_a_value: whether ``"auto"`` means something to DeepSpeed itself.
        aliases: other names of the keys of a section, to the one that we print.
        fields: keys of a section.
        open: whether a section takes other keys too.
    """

    kind: str
    nullable: bool = False
    default: Any = None
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    replaced_by: str | None = None
    auto_is_a_value: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Field] = field(default_factory=dict)
    open: bool = False

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Field:
        """The field of its description as plain data."""
        inside = {name: cls.read(below) for name, below in values.get("fields", {}).items()}
        rest = {name: value for name, value in values.items() if name not in ("fields", "choices")}
        return cls(**rest, choices=tuple(values.get("choices", ())), fields=inside)


class Schema:
    """Description of a DeepSpeed version's configuration.

    Args:
        description: what :mod:`ds_trainer.config.schema_build` wrote.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.version: str = description["deepspeed"]
        self.root = Field.read(description["root"])
        self.removed: dict[str, str] = description["removed"]
        self.schedulers: dict[str, list[str]] = description["schedulers"]

    def field(self, path: str) -> Field | None:
        """The field at a dotted ``path``; None where there is none."""
        found: Field | None = self.root
        for name in path.split("."):
            if found is None or found.kind != "section":
                return None
            found = found.fields.get(found.aliases.get(name, name), _LEAF if found.open else None)
        return found

    def canonical(self, path: str) -> str:
        """``path`` with every key under the one name that we print."""
        names, found = [], self.root
        for name in path.split("."):
            name = found.aliases.get(name, name)
            names.append(name)
            found = found.fields.get(name, _LEAF)
        return ".".join(names)

    def problems(self, root: Located) -> list[str]:
        """One sentence for everything in ``root`` that DeepSpeed does not take; each begins with its place."""
        return [sentence for _, sentence in self.findings(root)]

    def findings(self, root: Located) -> list[tuple[str, str]]:
        """:meth:`problems`, each with the dotted path (as it was written) that must not be gone on with."""
        return list(self._section(root, self.root, ""))

    # -- walking --------------------------------------------------------------------------------------------------

    def _section(self, entry: Located, section: Field, path: str) -> Iterator[tuple[str, str]]:
        given: dict[str, str] = {}
        for key, below in entry.value.items():
            full = f"{path}.{key}" if path else key
            name = section.aliases.get(key, key)
            if full in self.removed:
                yield full, f"{below.where}: {full} was removed from DeepSpeed. {self.removed[full]}"
            elif name not in section.fields:
                if not section.open:
                    yield full, f"{below.where}: unknown key {full}.{self._hint(key, section, path)}"
            elif name in given:
                yield full, f"{below.where}: {full} is another name of {given[name]}; keep one of them."
            else:
                given[name] = full
                yield from self._value(below, section.fields[name], full)
        if path == "scheduler":
            yield from self._scheduler(entry)

    def _value(self, entry: Located, wanted: Field, path: str) -> Iterator[tuple[str, str]]:
        value = entry.value
        if wanted.replaced_by is not None:
            yield path, f"{entry.where}: {path} is no longer used. {wanted.replaced_by}"
        elif value is None:
            if not wanted.nullable and wanted.kind != "section":
                yield path, f"{entry.where}: {path}=null must be {_expected(wanted)}; leave it out for the default."
        elif wanted.kind == "section":
            if isinstance(value, dict):
                yield from self._section(entry, wanted, path)
            else:
                yield path, f"{entry.where}: {path}={_shown(entry)} must be a mapping such as {_example(wanted)}."
        elif value == AUTO:
            return
        elif not _fits(entry.plain(), wanted):
            hint = _choice_hint(value, wanted)
            yield path, f"{entry.where}: {path}={_shown(entry)} must be {_expected(wanted)}.{hint}"

    def _hint(self, key: str, section: Field, path: str) -> str:
        homes = [home for home in _homes(self.root, key, "") if home != path]
        if len(homes) == 1:
            return f" It belongs in {homes[0]}." if homes[0] else " It belongs at the top level."
        near = did_you_mean(key, [*section.fields, *section.aliases])
        if near:
            return near
        known = ", ".join(section.fields)
        return f" Known keys are {known}." if len(section.fields) <= 12 else ""

    def _scheduler(self, entry: Located) -> Iterator[tuple[str, str]]:
        kind, params = entry.value.get("type"), entry.value.get("params")
        if kind is None or not isinstance(kind.value, str) or kind.value == AUTO:
            return
        if kind.value not in self.schedulers:
            near = did_you_mean(kind.value, self.schedulers)
            known = ", ".join(self.schedulers)
            yield "scheduler", f"{kind.where}: scheduler.type={_shown(kind)} is not one of {known}.{near}"
        elif params is not None and isinstance(params.value, dict):
            known_params = self.schedulers[kind.value]
            for name, below in params.value.items():
                if name not in known_params:
                    near = did_you_mean(name, known_params)
                    yield f"scheduler.params.{name}", f"{below.where}: {kind.value} has no parameter '{name}'.{near}"


_LEAF = Field("any")


def _homes(section: Field, key: str, path: str) -> Iterator[str]:
    """Sections that have ``key``."""
    if key in section.fields or key in section.aliases:
        yield path
    for name, below in section.fields.items():
        if below.kind == "section":
            yield from _homes(below, key, f"{path}.{name}" if path else name)


def _fits(value: Any, wanted: Field) -> bool:
    if not _has_kind(value, wanted.kind):
        return False
    if wanted.choices:
        return _lower(value) in [_lower(choice) for choice in wanted.choices]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            (wanted.minimum is None or value >= wanted.minimum)
            and (wanted.maximum is None or value <= wanted.maximum)
            and (wanted.above is None or value > wanted.above)
            and (wanted.below is None or value < wanted.below)
        )
    return True


def _has_kind(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return kind == "float" or float(value).is_integer()
    types: dict[str, type] = {"str": str, "list": list, "dict": dict}
    return isinstance(value, types.get(kind, object))


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _expected(wanted: Field) -> str:
    if wanted.choices:
        return f"one of {', '.join(json.dumps(choice) for choice in wanted.choices)}"
    words = _WORDS.get(wanted.kind, wanted.kind)
    limits = [
        f"{phrase} {limit:g}"
        for phrase, limit in (
            ("at least", wanted.minimum),
            ("at most", wanted.maximum),
            ("above", wanted.above),
            ("below", wanted.below),
        )
        if limit is not None
    ]
    return " ".join([words, " and ".join(limits)]).strip()


def _choice_hint(value: Any, wanted: Field) -> str:
    return did_you_mean(value, [str(choice) for choice in wanted.choices]) if isinstance(value, str) else ""


def _shown(entry: Located) -> str:
    text = json.dumps(entry.plain(), default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _example(section: Field) -> str:
    name, below = next(iter(section.fields.items()), (None, None))
    if below is None:
        return "{...}"
    return json.dumps({name: True if below.kind == "bool" else below.default})


# -- where the description is ----------------------------------------------------------------------------------------


@functools.cache
def load_schema() -> Schema:
    """The schema of the installed DeepSpeed (of the pinned one where none is installed)."""
    snapshot = read_json(SNAPSHOT)
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        installed = snapshot["deepspeed"]
    return Schema(snapshot if installed == snapshot["deepspeed"] else _of_version(installed))


def _of_version(version: str) -> Any:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "ds_trainer" / f"deepspeed-{version}-{_FORMAT}.json"
    try:
        return read_json(path)
    except (OSError, ValueError):
        from ds_trainer.config.schema_build import build_schema

        description = build_schema()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(description))
    except OSError:  # a read-only home costs the time again, nothing else
        return description
    return description

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
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.schema_values import AUTO, complaint, shown
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import read_json, write_text_atomic

SNAPSHOT = Path(__file__).with_name("deepspeed_schema.json")
_FORMAT = 2  # of the description; part of the name of cached ones


@dataclass(frozen=True)
class Field:
    """One key, or a section of keys (``kind == "section"``).

    Attributes:
        kind: bool, int, float, str, list, dict (taken as it is), any or section.
        nullable: whether ``null`` is allowed.
        default: DeepSpeed's default; None where it has none.
        choices: allowed values.
        any_case: whether ``choices`` are compared without regard to case.
        minimum, maximum: inclusive limits.
        above, below: exclusive limits.
        items: what the entries of a list must be; None for anything.
        listed: whether a list of such values is as good as one.
        required: whether it must be given.
        replaced_by: what to use instead of a deprecated key.
        refused: why a file must not have it; the end of a sentence that begins with the key.
        auto_is_a_value: whether ``"auto"`` means something to DeepSpeed itself.
        aliases: other names of the keys of a section, to the one that we print.
        fields: keys of a section.
        open: whether a section takes other keys too.
    """

    kind: str
    nullable: bool = False
    default: Any = None
    choices: tuple[Any, ...] = ()
    any_case: bool = False
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    items: Field | None = None
    listed: bool = False
    required: bool = False
    replaced_by: str | None = None
    refused: str | None = None
    auto_is_a_value: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Field] = field(default_factory=dict)
    open: bool = False

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Field:
        """The field of its description as plain data."""
        rest = {name: value for name, value in values.items() if name not in ("fields", "choices", "items")}
        return cls(
            **rest,
            choices=tuple(values.get("choices", ())),
            items=cls.read(values["items"]) if "items" in values else None,
            fields={name: cls.read(below) for name, below in values.get("fields", {}).items()},
        )


_LEAF = Field("any")


class Schema:
    """Description of a DeepSpeed version's configuration.

    Args:
        description: what :mod:`ds_trainer.config.schema_build` wrote.

    Attributes:
        version: of DeepSpeed.
        root: the section that is the whole configuration.
        removed: keys that DeepSpeed no longer has, by path, with what replaced them.
        types: ``optimizer`` and ``scheduler``: the parameters of each type, as a section by the type's name.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.version: str = description["deepspeed"]
        self.root = Field.read(description["root"])
        self.removed: dict[str, str] = description["removed"]
        self.types = {
            what: {name: Field.read(params) for name, params in kinds.items()}
            for what, kinds in description["types"].items()
        }

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
        given: dict[str, tuple[str, str]] = {}
        for key, below in entry.value.items():
            full = f"{path}.{key}" if path else key
            name = section.aliases.get(key, key)
            gone = f"{path}.{name}" if path else name
            if gone in self.removed:
                yield full, f"{below.where}: {full} was removed from DeepSpeed. {self.removed[gone]}"
            elif name not in section.fields:
                if not section.open:
                    yield full, f"{below.where}: unknown key {full}.{self._hint(key, section, path)}"
            elif name in given:
                other, where = given[name]
                yield full, f"{below.where}: {full} is another name of {other} ({where}); keep one of them."
            else:
                given[name] = (full, below.where)
                yield from self._value(below, section.fields[name], full)
        if path in self.types:
            yield from self._typed(entry, path)

    def _value(self, entry: Located, wanted: Field, path: str) -> Iterator[tuple[str, str]]:
        if wanted.replaced_by is not None:
            yield path, f"{entry.where}: {path} is no longer used. {wanted.replaced_by}"
        elif wanted.refused is not None:
            if entry.value not in (None, AUTO):  # those say nothing
                yield path, f"{entry.where}: {path} {wanted.refused}."
        elif wanted.kind != "section":
            yield from ((path, sentence) for sentence in complaint(entry, wanted, path))
        elif isinstance(entry.value, dict):
            yield from self._section(entry, wanted, path)
        elif entry.value is not None:
            yield path, f"{entry.where}: {path}={shown(entry)} must be a mapping such as {_example(wanted)}."

    def _typed(self, entry: Located, what: str) -> Iterator[tuple[str, str]]:
        """What is wrong with the type and the parameters of an optimizer or schedule.

        Which optimizers and parameters work here, fewer than DeepSpeed takes, is the compiler's business, so that it
        is said together with what contradicts the arguments.
        """
        kind, params = entry.value.get("type"), entry.value.get("params")
        if kind is None or not isinstance(kind.value, str) or kind.value == AUTO:
            return
        kinds = self.types[what]
        if what == "optimizer":
            name = next((known for known in kinds if known.lower() == kind.value.lower()), None)
        elif kind.value in kinds:
            name = kind.value
        else:
            near = did_you_mean(kind.value, kinds)
            yield what, f"{kind.where}: {what}.type={shown(kind)} is not one of {', '.join(kinds)}.{near}"
            return
        if name is None or (params is not None and not isinstance(params.value, dict)):
            return
        given = params.value if params is not None else {}
        for key, below in given.items():
            field = kinds[name].fields.get(key)
            if field is not None:
                yield from self._value(below, field, f"{what}.params.{key}") if below.value is not None else ()
            elif what == "scheduler":
                near = did_you_mean(key, kinds[name].fields)
                yield f"{what}.params.{key}", f"{below.where}: {name} has no parameter '{key}'.{near}"
        for key, field in kinds[name].fields.items():
            if field.required and (key not in given or given[key].value is None):
                yield what, f"{kind.where}: {what}.type={shown(kind)} needs {what}.params.{key}; add it."

    def _hint(self, key: str, section: Field, path: str) -> str:
        homes = [home for home in _homes(self.root, key, "") if home != path]
        if len(homes) == 1:
            return f" It belongs in {homes[0]}." if homes[0] else " It belongs at the top level."
        if key in TrainingArguments.__dataclass_fields__:
            return " It is an argument, not a key of DeepSpeed."
        if key in _OF_OPTIMIZERS and path != "optimizer.params":
            return " It belongs in optimizer.params."
        near = did_you_mean(key, [*section.fields, *section.aliases])
        if near:
            return near
        if 1 < len(homes) <= 3 and all(homes):
            return f" It belongs in {' or '.join(homes)}."
        known = ", ".join(section.fields)
        return f" Known keys are {known}." if len(section.fields) <= 12 else ""


_OF_OPTIMIZERS = ("lr", "betas", "eps", "momentum")


def _homes(section: Field, key: str, path: str) -> Iterator[str]:
    """Sections that have ``key``."""
    if key in section.fields or key in section.aliases:
        yield path
    for name, below in section.fields.items():
        if below.kind == "section":
            yield from _homes(below, key, f"{path}.{name}" if path else name)


def _example(section: Field) -> str:
    """A mapping to copy from: the switch of the section, or its first key."""
    name, below = next(iter(section.fields.items()), ("lr", _LEAF))
    value = True if below.kind == "bool" else below.default
    return json.dumps({name: value if value is not None else 1})


# -- where the description is ----------------------------------------------------------------------------------------


@functools.cache
def load_schema() -> Schema:
    """The schema of the installed DeepSpeed (of the pinned one where none is installed).

    Raises:
        ConfigError: a DeepSpeed is installed that is built too differently to be described.
    """
    snapshot = read_json(SNAPSHOT)
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        installed = snapshot["deepspeed"]
    return Schema(snapshot if installed == snapshot["deepspeed"] else _of_version(installed, snapshot["deepspeed"]))


def _of_version(version: str, pinned: str) -> Any:
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    path = base / "ds_trainer" / f"deepspeed-{version}-{_FORMAT}.json"
    try:
        kept = read_json(path)
        Schema(kept)
        return kept
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass  # not there, or not ours: it is made anew and written over
    from ds_trainer.config.schema_build import build_schema

    try:
        description = build_schema()
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"deepspeed {version} is installed, whose configuration cannot be read ({type(error).__name__}: {error}). "
            f"Run pip install deepspeed=={pinned}."
        ) from error
    try:
        write_text_atomic(path, json.dumps(description))
    except OSError:  # a read-only home costs the time again, nothing else
        return description
    return description

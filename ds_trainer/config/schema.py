"""The schema of DeepSpeed's configuration: keys, types, ranges and defaults.

``deepspeed_schema.json`` in this folder describes the pinned version of DeepSpeed; ``tools/build_deepspeed_schema.py``
writes it from DeepSpeed's classes. With any other installed version the same description applies, but a key that it
does not know is passed on with a warning instead of being refused.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.schema_values import AUTO, complaint, shown
from ds_trainer.utils.errors import did_you_mean
from ds_trainer.utils.files import read_json
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

SNAPSHOT = Path(__file__).with_name("deepspeed_schema.json")


@dataclass(frozen=True)
class Field:
    """A key, or a section of keys (``kind == "section"``).

    Attributes:
        kind: bool, int, float, str, list, dict (passed on as it is), any or section.
        nullable: whether ``null`` is allowed.
        default: DeepSpeed's default, or None.
        choices: allowed values.
        any_case: whether ``choices`` are case-insensitive.
        minimum, maximum: inclusive limits.
        above, below: exclusive limits.
        items: description of a list's entries; None for anything.
        listed: whether a list of such values is accepted too.
        required: whether the key is required.
        replaced_by: what to use instead of a deprecated key.
        refused: why a file must not have the key; the end of a sentence that begins with the key.
        auto_is_a_value: whether ``"auto"`` has a meaning in DeepSpeed.
        aliases: for a section, alternative names of its keys and the name to use.
        fields: keys of a section.
        open: whether a section accepts other keys.
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
        """Make the field from its description as plain data."""
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
        description: content of ``deepspeed_schema.json``.
        installed: the installed version of DeepSpeed; None if it is the described one.

    Attributes:
        version: the described version of DeepSpeed.
        root: the section of the whole configuration.
        removed: keys that DeepSpeed has removed, by path, with their replacements.
        types: for ``optimizer`` and ``scheduler``: the parameters of each type, as a section by the type's name.
    """

    def __init__(self, description: Mapping[str, Any], installed: str | None = None) -> None:
        self.version: str = description["deepspeed"]
        self._installed = installed
        self.root = Field.read(description["root"])
        self.removed: dict[str, str] = description["removed"]
        self.types = {
            block: {name: Field.read(params) for name, params in kinds.items()}
            for block, kinds in description["types"].items()
        }

    def field(self, path: str) -> Field | None:
        """The field at a dotted ``path``, or None."""
        found: Field | None = self.root
        for name in path.split("."):
            if found is None or found.kind != "section":
                return None
            found = found.fields.get(found.aliases.get(name, name), _LEAF if found.open else None)
        return found

    def canonical(self, path: str) -> str:
        """``path`` without aliases: every key by its main name."""
        names, found = [], self.root
        for name in path.split("."):
            name = found.aliases.get(name, name)
            names.append(name)
            found = found.fields.get(name, _LEAF)
        return ".".join(names)

    def problems(self, root: Located) -> list[str]:
        """One sentence for everything in ``root`` that DeepSpeed does not accept; each begins with its source."""
        return [sentence for _, sentence in self.findings(root)]

    def findings(self, root: Located) -> list[tuple[str, str]]:
        """:meth:`problems`, each with the dotted path (as written) of the invalid value."""
        return list(self._section(root, self.root, ""))

    # -- walking --------------------------------------------------------------------------------------------------

    def _section(self, entry: Located, section: Field, path: str) -> Iterator[tuple[str, str]]:
        given: dict[str, tuple[str, str]] = {}
        for key, below in entry.value.items():
            full = f"{path}.{key}" if path else key
            name = section.aliases.get(key, key)
            main_name = f"{path}.{name}" if path else name
            if main_name in self.removed:
                yield full, f"{below.where}: {full} was removed from DeepSpeed. {self.removed[main_name]}"
            elif name not in section.fields:
                if not section.open:
                    yield from self._unknown(
                        full, f"{below.where}: unknown key {full}.{self._hint(key, section, path)}"
                    )
            elif name in given:
                other, where = given[name]
                yield full, f"{below.where}: {full} is another name of {other} ({where}); keep one of them."
            else:
                given[name] = (full, below.where)
                yield from self._value(below, section.fields[name], full)
        if path in self.types:
            yield from self._typed(entry, path)

    def _unknown(self, path: str, problem: str) -> Iterator[tuple[str, str]]:
        if self._installed is None:
            yield path, problem
        else:
            logger.warning(
                "%s DeepSpeed %s is installed and gets the key as it is; the known keys are those of version %s.",
                problem,
                self._installed,
                self.version,
            )

    def _value(self, entry: Located, wanted: Field, path: str) -> Iterator[tuple[str, str]]:
        if wanted.replaced_by is not None:
            yield path, f"{entry.where}: {path} is no longer used. {wanted.replaced_by}"
        elif wanted.refused is not None:
            if entry.value not in (None, AUTO):  # as good as no value
                yield path, f"{entry.where}: {path} {wanted.refused}."
        elif wanted.kind != "section":
            yield from ((path, sentence) for sentence in complaint(entry, wanted, path))
        elif isinstance(entry.value, dict):
            yield from self._section(entry, wanted, path)
        elif entry.value is not None:
            yield path, f"{entry.where}: {path}={shown(entry)} must be a mapping such as {_example(wanted)}."

    def _typed(self, entry: Located, block: str) -> Iterator[tuple[str, str]]:
        """The problems of the type and the parameters of an optimizer or scheduler.

        The compiler checks which optimizers and parameters this package supports, together with conflicts with the
        arguments.
        """
        kind, params = entry.value.get("type"), entry.value.get("params")
        if kind is None or not isinstance(kind.value, str) or kind.value == AUTO:
            return
        kinds = self.types[block]
        if block == "optimizer":
            name = next((known for known in kinds if known.lower() == kind.value.lower()), None)
        elif kind.value in kinds:
            name = kind.value
        else:
            near = did_you_mean(kind.value, kinds)
            yield block, f"{kind.where}: {block}.type={shown(kind)} is not one of {', '.join(kinds)}.{near}"
            return
        if name is None or (params is not None and not isinstance(params.value, dict)):
            return
        given = params.value if params is not None else {}
        for key, below in given.items():
            field = kinds[name].fields.get(key)
            if field is not None:
                yield from self._value(below, field, f"{block}.params.{key}") if below.value is not None else ()
            elif block == "scheduler":
                near = did_you_mean(key, kinds[name].fields)
                yield f"{block}.params.{key}", f"{below.where}: {name} has no parameter '{key}'.{near}"
        for key, field in kinds[name].fields.items():
            if field.required and (key not in given or given[key].value is None):
                yield block, f"{kind.where}: {block}.type={shown(kind)} needs {block}.params.{key}; add it."

    def _hint(self, key: str, section: Field, path: str) -> str:
        homes = [home for home in _homes(self.root, key, "") if home != path]
        if len(homes) == 1:
            return f" It belongs in {homes[0]}." if homes[0] else " It belongs at the top level."
        if key in TrainingArguments.__dataclass_fields__:
            return " It is an argument, not a DeepSpeed key."
        if key in _OF_OPTIMIZERS and path != "optimizer.params":
            return " It belongs in optimizer.params."
        near = did_you_mean(key, [*section.fields, *section.aliases])
        if near:
            return near
        if 1 < len(homes) <= 3 and all(homes):
            return f" It belongs in {' or '.join(homes)}."
        known = ", ".join(section.fields)
        return f" Known keys: {known}." if len(section.fields) <= 12 else ""


_OF_OPTIMIZERS = ("lr", "betas", "eps", "momentum")


def _homes(section: Field, key: str, path: str) -> Iterator[str]:
    """The sections that contain ``key``."""
    if key in section.fields or key in section.aliases:
        yield path
    for name, below in section.fields.items():
        if below.kind == "section":
            yield from _homes(below, key, f"{path}.{name}" if path else name)


def _example(section: Field) -> str:
    """An example of the section, with its first key."""
    name, below = next(iter(section.fields.items()), ("lr", _LEAF))
    value = True if below.kind == "bool" else below.default
    return json.dumps({name: value if value is not None else 1})


@functools.cache
def load_schema() -> Schema:
    """The schema of the pinned DeepSpeed, which warns about unknown keys if another version is installed."""
    snapshot = read_json(SNAPSHOT)
    try:
        installed = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        installed = snapshot["deepspeed"]
    return Schema(snapshot, None if installed == snapshot["deepspeed"] else installed)

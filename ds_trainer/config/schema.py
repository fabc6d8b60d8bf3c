"""The schema of DeepSpeed's configuration: keys, types, ranges and defaults.

``deepspeed_schema.json`` in this folder describes the pinned version of DeepSpeed; ``tools/build_deepspeed_schema.py``
writes it from DeepSpeed's classes. With any other installed version the same description applies, but a key that it
does not know is passed on with a warning instead of being refused.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.schema_values import AUTO, complaint, remedy, shown
from ds_trainer.utils.errors import did_you_mean, listed
from ds_trainer.utils.files import read_json

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
        strict: whether DeepSpeed refuses other keys of a section; it then also converts values such as ``"true"``.
        idle: whether DeepSpeed does not look at the value while its block is off.
        turns_off: whether ``enabled`` of a section turns off a block with idle keys.
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
    strict: bool = False
    idle: bool = False
    turns_off: bool = False

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Field:
        """Make the field from its description as plain data."""
        rest = {name: value for name, value in values.items() if name not in ("fields", "choices", "items")}
        return cls(
            **rest,
            choices=tuple(values.get("choices", ())),
            items=cls.read(values["items"]) if "items" in values else None,
            fields={
                name: replace(field, strict=field.strict or rest.get("strict", False))
                for name, field in ((name, cls.read(below)) for name, below in values.get("fields", {}).items())
            },
        )


_LEAF = Field("any")


class KeyFinding(NamedTuple):
    """Something about a key of a file.

    Attributes:
        path: the key, dotted, as written.
        sentence: what is wrong with it; begins with its source. Of a key that DeepSpeed does not read, its name.
        refused: False for a key that DeepSpeed does not read.
        meant: the key that was probably meant, by its main names.
    """

    path: str
    sentence: str
    refused: bool = True
    meant: str = ""


class Schema:
    """Description of a DeepSpeed version's configuration.

    Args:
        description: content of ``deepspeed_schema.json``.
        installed: the installed version of DeepSpeed; None if it is the described one.

    Attributes:
        version: the described version of DeepSpeed.
        root: the section of the whole configuration.
        removed: keys that DeepSpeed has removed, by path, with their replacements.
        unread: the removed keys that DeepSpeed does not refuse itself.
        types: for ``optimizer`` and ``scheduler``: the parameters of each type, as a section by the type's name.
    """

    def __init__(self, description: Mapping[str, Any], installed: str | None = None) -> None:
        self.version: str = description["deepspeed"]
        self._installed = installed
        self.root = Field.read(description["root"])
        self.removed: dict[str, str] = description["removed"]
        self.unread = frozenset(description["unread"])
        self.types = {
            block: {name: Field.read(params) for name, params in kinds.items()}
            for block, kinds in description["types"].items()
        }

    def field(self, path: str) -> Field | None:
        """The field at a dotted ``path``, or None."""
        field: Field | None = self.root
        for name in path.split("."):
            if field is None or field.kind != "section":
                return None
            field = field.fields.get(field.aliases.get(name, name), _LEAF if field.open else None)
        return field

    def canonical(self, path: str) -> str:
        """``path`` without aliases: every key by its main name."""
        names, field = [], self.root
        for name in path.split("."):
            name = field.aliases.get(name, name)
            names.append(name)
            field = field.fields.get(name, _LEAF)
        return ".".join(names)

    def problems(self, root: Located) -> list[str]:
        """One sentence for everything in ``root`` that DeepSpeed does not accept; each begins with its source."""
        return [finding.sentence for finding in self.findings(root) if finding.refused]

    def findings(self, root: Located) -> list[KeyFinding]:
        """What there is to say about the keys of ``root``: :meth:`problems`, and what DeepSpeed does not read."""
        return list(self._section(root, self.root, "", ""))

    def without_effect(self, names: Iterable[str]) -> str:
        """The sentence about keys that DeepSpeed does not read, each with its source."""
        listed_names = listed(names, 50)
        if self._installed is None:
            return f"DeepSpeed {self.version} does not read {listed_names}."
        return (
            f"The keys of DeepSpeed {self.version} are known, which do not include {listed_names}. DeepSpeed "
            f"{self._installed} is installed and gets them as they are."
        )

    # -- walking --------------------------------------------------------------------------------------------------

    def _section(self, entry: Located, section: Field, path: str, home: str, off: bool = False) -> Iterator[KeyFinding]:
        """What there is to say about a section that is written at ``path`` and belongs at ``home``.

        ``off``: it is inside of a block that is not enabled.
        """
        given: dict[str, tuple[str, str]] = {}
        unknown = 0
        enabled = entry.value.get("enabled")
        off |= section.turns_off and (enabled is None or enabled.value is False)
        for key, below in entry.value.items():
            full, name = _join(path, key), section.aliases.get(key, key)
            main_name = _join(home, name)
            if main_name in self.removed:
                yield from self._removed(below, full, main_name)
            elif name not in section.fields:
                if not section.open:
                    unknown += 1
                    hinted = unknown <= _MOST_HINTS or key in TrainingArguments.__dataclass_fields__
                    yield from self._unknown(below, key, section, path, home, off=off, hinted=hinted)
            elif name in given:
                other, where = given[name]
                yield KeyFinding(full, f"{below.where}: {full} is another name of {other} ({where}); keep one of them.")
            elif not (off and section.fields[name].idle):
                given[name] = (full, below.where)
                yield from self._value(below, section.fields[name], full, main_name, off)
        if home in self.types:
            yield from self._typed(entry, home)

    def _removed(self, entry: Located, path: str, name: str) -> Iterator[KeyFinding]:
        instead = self.field(self.removed[name].removeprefix("Write ").rstrip("."))
        if name in self.unread and (_is_off(entry) or (instead is not None and _is_default(entry, instead))):
            yield KeyFinding(path, _unread(path, entry), refused=False)
        else:
            yield KeyFinding(path, f"{entry.where}: {path} was removed from DeepSpeed. {self.removed[name]}")

    def _unknown(
        self, entry: Located, key: str, section: Field, path: str, home: str, off: bool, hinted: bool
    ) -> Iterator[KeyFinding]:
        """An unknown key: refused where DeepSpeed refuses it, or where it takes another value than was meant."""
        full = _join(path, key)
        hint, meant, certain = self._meant(key, section, home) if hinted else ("", "", False)
        if self._installed is not None:
            yield KeyFinding(full, _unread(full, entry, hint), False, meant)
            return
        field = self.field(meant) if meant else None
        certain &= field is None or (field.kind == "section") is isinstance(entry.value, dict)
        as_good_as_none = field is not None and meant.rpartition(".")[0] != home and _is_default(entry, field)
        changes = not off and certain and not as_good_as_none
        if section.strict or changes:
            yield KeyFinding(full, f"{entry.where}: unknown key {full}.{hint or ' Remove it.'}", True, meant)
            if field is not None and field.kind == "section" and isinstance(entry.value, dict):
                yield from self._section(entry, field, full, meant)
        else:
            yield KeyFinding(full, _unread(full, entry, hint if meant else ""), False, meant)

    def _value(self, entry: Located, wanted: Field, path: str, home: str, off: bool = False) -> Iterator[KeyFinding]:
        if wanted.replaced_by is not None:
            if not _is_off(entry):
                yield KeyFinding(path, f"{entry.where}: {path} is no longer used. {wanted.replaced_by}")
        elif wanted.refused is not None:
            if entry.value not in (None, AUTO):  # as good as no value
                yield KeyFinding(path, f"{entry.where}: {path} {wanted.refused}.")
        elif wanted.kind != "section":
            yield from (KeyFinding(path, sentence) for sentence in complaint(entry, wanted, path))
        elif isinstance(entry.value, dict):
            yield from self._section(entry, wanted, path, home, off)
        elif entry.value is not None:
            text = f"{path}={shown(entry)} must be a mapping such as {_example(wanted)}."
            yield KeyFinding(path, f"{entry.where}: {text}{remedy(entry.value, wanted)}")

    def _typed(self, entry: Located, block: str) -> Iterator[KeyFinding]:
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
            yield KeyFinding(block, f"{kind.where}: {block}.type={shown(kind)} is not one of {', '.join(kinds)}.{near}")
            return
        if name is None or (params is not None and not isinstance(params.value, dict)):
            return
        given = params.value if params is not None else {}
        for key, below in given.items():
            field = kinds[name].fields.get(key)
            if field is not None:
                path = f"{block}.params.{key}"
                yield from self._value(below, field, path, path) if below.value is not None else ()
            elif block == "scheduler":
                near = did_you_mean(key, kinds[name].fields)
                path = f"{block}.params.{key}"
                yield KeyFinding(path, f"{below.where}: {name} has no parameter '{key}'.{near}")
        for key, field in kinds[name].fields.items():
            if field.required and (key not in given or given[key].value is None):
                path = f"{block}.params.{key}"
                yield KeyFinding(path, f"{kind.where}: {block}.type={shown(kind)} needs {path}; add it.")

    def _meant(self, key: str, section: Field, home: str) -> tuple[str, str, bool]:
        """What an unknown key probably means: a hint, the key's right place, and whether it is no coincidence."""
        homes = [place for place in _homes(self.root, key, "") if place != home]
        is_argument = key in TrainingArguments.__dataclass_fields__
        if len(homes) == 1 and not (is_argument and _only_reports(homes)):
            hint = f" It belongs in {homes[0]}." if homes[0] else " It belongs at the top level."
            return hint, _join(homes[0], key), not _only_reports(homes)
        if is_argument:
            return " It is an argument, not a DeepSpeed key. Set it there, and remove it here.", "", True
        if key in _OF_OPTIMIZERS and home != "optimizer.params":
            return " It belongs in optimizer.params.", _join("optimizer.params", key), True
        names = [*section.fields, *section.aliases]
        near = did_you_mean(key.lower(), names)
        if near:
            meant = near.split("'")[1]
            certain = did_you_mean(key.lower(), names, cutoff=_MISSPELLED) != ""
            return near, _join(home, section.aliases.get(meant, meant)), certain
        if 1 < len(homes) <= 3 and all(homes):
            return f" It belongs in {' or '.join(homes)}.", "", not _only_reports(homes)
        known = ", ".join(section.fields)
        return f" Remove it. Known keys: {known}." if len(section.fields) <= 12 else "", "", False


_MOST_HINTS = 100  # for unknown keys of a section: looking for what was meant takes a millisecond each
_OF_OPTIMIZERS = ("lr", "betas", "eps", "momentum")
_MISSPELLED = 0.8  # similarity from which a key is a misspelled other one, and not a key of another program
# Sections without which a run computes the same; data_efficiency is refused where it is on.
_REPORTS = {"autotuning", "comet", "comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "timers", "wandb"}
_REPORTS |= {"data_efficiency"}


def _only_reports(sections: list[str]) -> bool:
    return {name.partition(".")[0] for name in sections} <= _REPORTS


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unread(path: str, entry: Located, hint: str = "") -> str:
    """The clause about a key that DeepSpeed does not read."""
    hint = hint.strip().removesuffix(".")
    return f"{path} ({entry.where}{f'; {hint[0].lower()}{hint[1:]}' if hint else ''})"


def _is_off(entry: Located) -> bool:
    """Whether a value asks for nothing: false, null, nothing, or a section that is not enabled."""
    enabled = entry.value.get("enabled") if isinstance(entry.value, dict) else None
    return not entry.value or (enabled is not None and enabled.value is False)


def _is_default(entry: Located, field: Field) -> bool:
    """Whether a value, or all of a section, is what DeepSpeed uses without it."""
    if field.kind != "section":
        same_kind = isinstance(entry.value, bool) is isinstance(field.default, bool)  # True is 1
        return entry.value is None or (same_kind and entry.plain() == field.default)
    return isinstance(entry.value, dict) and all(
        key in field.fields and _is_default(below, field.fields[key]) for key, below in entry.value.items()
    )


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

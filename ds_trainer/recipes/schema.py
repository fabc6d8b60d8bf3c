"""The JSON schema of a recipe, for editors: every key with its type, default and meaning, from the dataclasses."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from typing import Any

from ds_trainer.arguments.compat.renamed_arguments import RENAMED
from ds_trainer.recipes.recipe import SECTIONS

SCHEMA_FILE = "recipe.schema.json"
_SCALAR = {"type": ["string", "number", "boolean"]}  # the reader takes the text of any scalar as a str
# Sections that also have a shorter form: a list of sources, the name of a task, the path of a teacher.
_SHORT_FORMS = {"data": "train", "task": "name", "distillation": "teacher"}


def recipe_schema() -> dict[str, Any]:
    """The schema (draft 2020-12)."""
    properties = {name: _section(name, spec) for name, spec in SECTIONS.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of ds-trainer",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def schema_text() -> str:
    """The content of :data:`SCHEMA_FILE`."""
    return json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"


def attribute_meanings(spec: type) -> dict[str, str]:
    """Meanings of the fields of a dataclass, from the section ``Attributes:`` of its docstring."""
    text = (inspect.getdoc(spec) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE)
    return {name: _sentence(" ".join(meaning.split())) for name, meaning in entries}


def _sentence(text: str) -> str:
    text = text.replace("``", "`")
    return text[0].upper() + text[1:]


def _section(name: str, spec: Any) -> dict[str, Any]:
    section = _dataclass(spec)
    if name == "arguments":
        old = {
            key: {**_of_hint(row.hint), "description": row.now, "deprecated": True}
            for key, row in RENAMED.items()
            if key not in section["properties"]
        }
        section["properties"].update(old)
    forms = [section, {"type": "null"}]
    short = _SHORT_FORMS.get(name)
    if short is not None and short in section["properties"]:
        form = section["properties"][short]
        forms.append({key: form[key] for key in ("type", "enum", "items", "anyOf") if key in form})
    return {"anyOf": forms, "description": _sentence(inspect.getdoc(spec).split("\n\n")[0].replace("\n", " "))}  # type: ignore[union-attr]


def _dataclass(spec: Any) -> dict[str, Any]:
    hints, meanings = typing.get_type_hints(spec), attribute_meanings(spec)
    properties = {}
    for field in dataclasses.fields(spec):
        if not field.init:
            continue
        described = _of_hint(hints[field.name])
        meaning = field.metadata.get("help") or meanings.get(field.name)
        if meaning:
            described["description"] = meaning
        default = field.default_factory() if callable(field.default_factory) else field.default
        default = getattr(default, "value", default)
        if isinstance(default, bool | int | float | str) and default == default:  # not NaN
            described["default"] = default
        properties[field.name] = described
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of_hint(hint: Any) -> dict[str, Any]:
    """The schema of what :func:`ds_trainer.arguments.typed.read_as` accepts for a type hint."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        named = any(isinstance(member, type) and issubclass(member, enum.Enum) for member in arguments)
        # As in error messages: beside the members of an Enum, str stands for their values.
        forms = [_of_hint(member) for member in arguments if not (member is str and named)]
        if any(not form for form in forms):
            return {}
        flat = [part for form in forms for part in (form["anyOf"] if set(form) == {"anyOf"} else [form])]
        unique = [form for index, form in enumerate(flat) if form not in flat[:index]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (None, type(None)):
        return {"type": "null"}
    if not isinstance(origin, type):
        return {}
    if issubclass(origin, enum.Enum):
        return {"enum": [member.value for member in origin]}
    if dataclasses.is_dataclass(origin):
        return _dataclass(origin)
    if issubclass(origin, bool):
        return {"type": "boolean"}
    if issubclass(origin, int):
        return {"type": "integer"}
    if issubclass(origin, float):
        return {"type": "number"}
    if issubclass(origin, dict):
        return {"type": "object", **({"additionalProperties": _of_hint(arguments[1])} if arguments else {})}
    if issubclass(origin, list | tuple):
        element = _of_hint(arguments[0]) if arguments else {}
        return {"anyOf": [{"type": "array", "items": element}, element]} if element else {}
    return dict(_SCALAR) if issubclass(origin, str) else {}

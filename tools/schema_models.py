"""Describes DeepSpeed's pydantic models as plain data."""

from __future__ import annotations

import enum
import types
import typing
from pathlib import Path
from typing import Any

_KINDS = (("bool", bool), ("int", int), ("float", float), ("list", list | tuple), ("dict", dict), ("str", str | Path))
_LIMITS = {"ge": "minimum", "le": "maximum", "gt": "above", "lt": "below"}
_NOT_JSON = "takes a Python object, which a configuration cannot hold; leave it out"
_INTERNAL = "is filled in by DeepSpeed itself; leave it out"


def section(fields: dict[str, Any], aliases: dict[str, str] | None = None, **more: bool) -> dict[str, Any]:
    """A section with ``fields``. An ``open`` section accepts other keys too; ``strict``: see :func:`describe_model`."""
    return {"kind": "section", "fields": fields, **({"aliases": aliases} if aliases else {}), **more}


def describe_model(model: Any) -> dict[str, Any]:
    """The section of a pydantic model: kinds, limits, defaults, aliases, deprecated fields.

    It is strict if the model refuses other keys. Such a model also converts values: ``"true"``, ``"2"``.
    """
    fields, aliases = {}, {}
    for name, info in model.model_fields.items():
        printed = info.alias or name
        if printed != name:
            aliases[name] = printed
        described = {**_of_hint(info.annotation), **_limits(info.metadata)}
        if described["kind"] != "section":
            described["default"] = plain(None if info.is_required() else info.get_default(call_default_factory=True))
        fields[printed] = described | _not_to_be_written(model, info)
    return section(fields, aliases, **({"strict": True} if model.model_config.get("extra") == "forbid" else {}))


def plain(value: Any) -> Any:
    """``value`` in the types of JSON."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)  # DeepSpeed's integers print with commas
    return value if value is None or isinstance(value, bool | float | str | dict) else str(value)


def _not_to_be_written(model: Any, info: Any) -> dict[str, Any]:
    """Why the field must not be in a configuration; empty if it may."""
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    if extra.get("deprecated"):
        new = str(extra.get("new_param", ""))
        return {"replaced_by": f"Use {_new_name(model, new)} instead." if new else "Leave it out."}
    if info.exclude:
        return {"kind": "any", "refused": _INTERNAL}
    members = [member for member in (typing.get_args(info.annotation) or [info.annotation]) if member is not type(None)]
    return {"kind": "any", "refused": _NOT_JSON} if all(_is_object(member) for member in members) else {}


def _is_object(hint: Any) -> bool:
    """Whether only a Python object fits: ``object`` itself, or a class such as ``torch.dtype``."""
    if hint is object:
        return True
    known = (bool, int, float, list, tuple, dict, str, Path, enum.Enum)
    return isinstance(hint, type) and not issubclass(hint, known) and not hasattr(hint, "model_fields")


def _new_name(model: Any, new: str) -> str:
    info = model.model_fields.get(new)
    name = info.alias or new if info is not None else new
    return f'{name}: {{"device": "cpu"}}' if name in ("offload_param", "offload_optimizer") else name


def _of_hint(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = [_of_hint(member) for member in arguments if member is not type(None)]
        nullable = {"nullable": True} if type(None) in arguments else {}
        return {**(members[0] if len(members) == 1 else {"kind": "any"}), **nullable}
    if origin is typing.Literal:
        return {"kind": "str", "choices": list(arguments)}
    if hasattr(hint, "model_fields"):
        return describe_model(hint)
    known = origin or hint
    if not isinstance(known, type):
        return {"kind": "any"}
    if issubclass(known, enum.Enum):
        values = list(dict.fromkeys(plain(member.value) for member in known))
        return {"kind": "str" if isinstance(values[0], str) else "int", "choices": values}
    for kind, classes in _KINDS:
        if issubclass(known, classes):
            return {"kind": kind, **({"items": _of_hint(arguments[0])} if kind == "list" and arguments else {})}
    return {"kind": "any"}


def _limits(metadata: list[Any]) -> dict[str, Any]:
    return {
        ours: getattr(item, theirs) for item in metadata for theirs, ours in _LIMITS.items() if hasattr(item, theirs)
    }

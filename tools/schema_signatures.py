"""Describes the keys that DeepSpeed reads without a pydantic model, and the parameters of functions.

DeepSpeed's older code reads ``param_dict.get(name, default)``. :class:`RecordingDict` is an empty mapping that returns
the defaults and records the names, so the description is complete. Functions (schedules, optimizers) are inspected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from schema_models import plain, section


class RecordingDict(dict[str, Any]):
    """A mapping that records every key that is read, with the default given by the reader, in ``recorded``."""

    def __init__(self, **inside: Any) -> None:
        super().__init__(inside)
        self.recorded: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True  # DeepSpeed often skips an empty section

    def __contains__(self, key: object) -> bool:
        self.recorded.setdefault(str(key), None)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default``; recorded."""
        if self.recorded.get(key) is None:
            self.recorded[key] = default
        return super().get(key, default)

    def keys(self) -> Any:
        """The mapping itself, so that ``key in mapping.keys()`` is recorded too."""
        return self


def describe_recorded(mapping: RecordingDict) -> dict[str, Any]:
    """The section of all keys that ``mapping`` has recorded, with its subsections."""
    fields = {}
    for name, default in mapping.recorded.items():
        inside = dict.get(mapping, name)
        fields[name] = describe_recorded(inside) if isinstance(inside, RecordingDict) else of_default(default)
    return section(fields)


def of_default(value: Any) -> dict[str, Any]:
    """The description that follows from a default. None and sentinel objects describe nothing."""
    if value is None or type(value) is object:
        return {"kind": "any", "nullable": True}
    kind = type(value).__name__
    return {"kind": {"tuple": "list"}.get(kind, kind), "default": plain(value)}


def describe_callables(callables: Iterable[Callable[..., Any]], leave_out: Iterable[str]) -> dict[str, Any]:
    """The section of the parameters of any of ``callables``. A parameter is required if all of them require it.

    A number is a ``float`` unless its hint is ``int``: ``weight_decay=0`` does not mean an integer.
    """
    fields: dict[str, dict[str, Any]] = {}
    parameters = [inspect.signature(each).parameters for each in callables]
    for taken in parameters:
        for name, parameter in taken.items():
            if (
                name in leave_out
                or name == "self"
                or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            ):
                continue
            described = _of_parameter(parameter)
            if name not in fields or fields[name]["kind"] == "any":
                fields[name] = described
    for name, field in fields.items():
        if all(name in taken and taken[name].default is inspect.Parameter.empty for taken in parameters):
            field["required"] = True
            field.pop("nullable", None)
    return section(fields)


def _of_parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    hint = {"int": "int", "float": "float"}.get(getattr(parameter.annotation, "__name__", str(parameter.annotation)))
    default = None if parameter.default is inspect.Parameter.empty else parameter.default
    if default is None:
        return {"kind": hint or "any", "nullable": True}
    described = of_default(default)
    if described["kind"] in ("int", "float"):
        described["kind"] = hint or "float"
    return described

"""Describes what DeepSpeed reads without a model: by handing it a mapping that notes what it is asked for.

DeepSpeed's older code reads ``param_dict.get(name, default)``. :class:`Asked` is an empty mapping that answers with the
defaults and keeps the names, so the description is complete by construction. Functions with signatures (schedules,
optimizers) are inspected. Imports no deepspeed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ds_trainer.config.schema_models import plain, section


class Asked(dict[str, Any]):
    """A mapping that notes every key that it is asked for, with the default that was offered, in ``asked``."""

    def __init__(self, **inside: Any) -> None:
        super().__init__(inside)
        self.asked: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True  # an empty section is often not read at all

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default``; noted."""
        if self.asked.get(key) is None:
            self.asked[key] = default
        return super().get(key, default)

    def keys(self) -> Any:
        """Itself, so that ``key in mapping.keys()`` is noted too."""
        return self


def describe_asked(mapping: Asked) -> dict[str, Any]:
    """The section of everything that ``mapping`` was asked for, with the sections inside it."""
    fields = {}
    for name, default in mapping.asked.items():
        inside = dict.get(mapping, name)
        fields[name] = describe_asked(inside) if isinstance(inside, Asked) else of_default(default)
    return section(fields)


def of_default(value: Any) -> dict[str, Any]:
    """What a default says about its key: as good as no default (None, a mark) says nothing."""
    if value is None or type(value) is object:
        return {"kind": "any", "nullable": True}
    kind = type(value).__name__
    return {"kind": {"tuple": "list"}.get(kind, kind), "default": plain(value)}


def describe_callables(callables: Iterable[Callable[..., Any]], leave_out: Iterable[str]) -> dict[str, Any]:
    """The section of the parameters that any of ``callables`` takes; required are those that all of them require.

    A number is a ``float`` unless its hint says ``int``: ``weight_decay=0`` does not mean whole numbers.
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

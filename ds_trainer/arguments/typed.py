"""Reads a value from a file or command line by the type hint of its field."""

from __future__ import annotations

import enum
import math
import os
import types
import typing
from typing import Any

from ds_trainer.arguments.yaml_reader import Located, parse_float
from ds_trainer.utils.files import shortened

_YES_NO = {"yes": True, "on": True, "no": False, "off": False}
# In a union the narrowest type wins. str accepts anything, so it comes last.
_NARROWEST_FIRST = ("NoneType", "Literal", "Enum", "bool", "int", "float", "list", "dict", "str", "Any")


_TOO_LARGE = 2**63


class WrongType(ValueError):
    """The value does not fit the type hint."""


def read_as(located: Located, hint: Any) -> Any:
    """``located`` as a value of type ``hint``.

    Supported hints: None, bool, int, float, str (and path types), Literal, Enum (returns the member's value), list,
    tuple, dict, their parametrized forms, unions of them, Any. A single value becomes a list of one if a list is
    expected.

    Raises:
        WrongType: the value does not fit; the message is ``expected <type>, got <value>``.
    """
    try:
        return _read(located, hint, in_union=False)
    except WrongType:
        raise WrongType(f"expected {describe(hint)}, got {_got(located)}") from None


def describe(hint: Any) -> str:
    """A type hint as text for messages."""
    kind = _kind(hint)
    arguments = typing.get_args(hint)
    if kind == "Union":
        kinds = {_kind(member) for member in arguments}
        members = [member for member in arguments if not (_kind(member) == "str" and "Enum" in kinds)]
        return " or ".join(dict.fromkeys(describe(member) for member in sorted(members, key=_rank, reverse=True)))
    if kind == "Literal":
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if kind == "Enum":
        return "one of " + ", ".join(repr(member.value) for member in hint)
    if kind == "list":
        return f"a list of {describe(arguments[0])}" if arguments else "a list"
    return {"NoneType": "null", "dict": "a mapping", "Any": "any value"}.get(kind, kind)


def _read(located: Located, hint: Any, *, in_union: bool) -> Any:
    kind = _kind(hint)
    value, text = located.value, located.text
    if kind == "Any":
        return located.plain()
    if kind == "Union":
        return _read_union(located, typing.get_args(hint))
    if kind == "NoneType" and value is None:
        return None
    if kind == "bool":
        if isinstance(value, bool):
            return value
        if not in_union and text is not None and text.lower() in _YES_NO:
            return _YES_NO[text.lower()]
    if isinstance(value, int | float) and _TOO_LARGE <= abs(value) < math.inf:
        raise WrongType
    if kind == "int" and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():  # people write ten thousand as 1e4
            return int(value)
    if kind == "float" and not isinstance(value, bool):
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str) and text is not None:
            return _float(text)
    if kind == "str" and value is not None:
        if text is not None:
            return text
        if isinstance(value, str):
            return value
    if kind in ("Literal", "Enum"):
        choices = typing.get_args(hint) if kind == "Literal" else [member.value for member in hint]
        for choice in choices:
            if located.value == choice and isinstance(located.value, bool) == isinstance(choice, bool):
                return choice
            if isinstance(choice, str) and located.text == choice:
                return choice
        raise WrongType
    if kind == "list":
        return _read_list(located, hint)
    if kind == "dict" and isinstance(value, dict):
        arguments = typing.get_args(hint)
        return {key: _read(entry, arguments[1] if arguments else Any, in_union=False) for key, entry in value.items()}
    raise WrongType


def _read_union(located: Located, members: tuple[Any, ...]) -> Any:
    takes_text = any(_kind(member) in ("str", "Literal", "Enum") for member in members)
    for member in sorted(members, key=_rank):
        try:
            return _read(located, member, in_union=takes_text)
        except WrongType:
            continue
    raise WrongType


def _read_list(located: Located, hint: Any) -> Any:
    arguments = typing.get_args(hint)
    element = arguments[0] if arguments else Any
    entries = located.value if isinstance(located.value, list) else [located]
    if located.value is None or isinstance(located.value, dict):
        raise WrongType
    container = tuple if (typing.get_origin(hint) or hint) is tuple else list
    return container(_read(entry, element, in_union=False) for entry in entries)


def _float(text: str) -> float:
    try:
        return parse_float(text)
    except ValueError:
        raise WrongType from None


def _kind(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return "Union"
    if origin is typing.Literal:
        return "Literal"
    if origin is None or origin is type(None):
        return "NoneType"
    if not isinstance(origin, type):
        return "Any"
    if issubclass(origin, enum.Enum):
        return "Enum"
    for known in (bool, int, float, dict):
        if issubclass(origin, known):
            return known.__name__
    if issubclass(origin, list | tuple):
        return "list"
    if issubclass(origin, str | os.PathLike):
        return "str"
    return "Any"


def _rank(hint: Any) -> int:
    kind = _kind(hint)
    return _NARROWEST_FIRST.index(kind) if kind in _NARROWEST_FIRST else len(_NARROWEST_FIRST)


def _got(located: Located) -> str:
    value = located.value
    if value is None:
        return "null"
    if isinstance(value, int) and not -_TOO_LARGE < value < _TOO_LARGE:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"the list {located.plain()!r}"
    return f"{shortened(repr(value), 99)} ({type(value).__name__})"

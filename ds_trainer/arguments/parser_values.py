"""Converts the text of command-line arguments to the type of a field, and says how argparse describes that type."""

from __future__ import annotations

import argparse
import enum
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import Located, read_command_line_value

TRUE_TEXTS, FALSE_TEXTS = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


@dataclass(frozen=True)
class Wrong:
    """A text that does not fit the type of its argument; the sentence lacks the source of the text."""

    problem: str


def converter(hint: Any, flag: str) -> Callable[[str], Any]:
    """A function that converts a text to type ``hint``, or to :class:`Wrong` if it does not fit."""
    element = _element(hint)

    def convert(text: str) -> Any:
        if is_switch(hint) and text.lower() in TRUE_TEXTS + FALSE_TEXTS:
            return text.lower() in TRUE_TEXTS
        try:
            return read_as(_located(text, element), element)
        except WrongType as error:
            return Wrong(f"{flag} {text}: {error}.")

    return convert


def strict(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """``convert`` with argparse's own error instead of :class:`Wrong`, for a parser that does not collect problems."""

    def converted(text: str) -> Any:
        value = convert(text)
        if isinstance(value, Wrong):
            raise argparse.ArgumentTypeError(value.problem)
        return value

    return converted


def is_switch(hint: Any) -> bool:
    """Whether a flag without a value means True: bool, or bool or None."""
    return bool in _members(hint) and set(_members(hint)) <= {bool, type(None)}


def accepts_list(hint: Any) -> bool:
    """Whether several values may follow, as a list."""
    return any(_is_list(member) for member in _members(hint)) and not any(
        member is str or _is_dict(member) for member in _members(hint)
    )


def argparse_type(hint: Any) -> type | None:
    """int, float or str where one value of the field is that and nothing else but None; otherwise None."""
    members = {member for member in _members(_element(hint)) if member is not type(None)}
    return members.pop() if len(members) == 1 and members <= {int, float, str} else None


def choices(hint: Any) -> list[Any] | None:
    """The values of a field with a closed list, those of ``Literal`` and of enums; None for an open type.

    ``str`` beside an enum is its spelling on a command line, so the list stays closed.
    """
    members = [member for member in _members(hint) if member not in (type(None), str)]
    values: list[Any] = []
    for member in members:
        if typing.get_origin(member) is typing.Literal:
            values += typing.get_args(member)
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            values += [choice.value for choice in member]
        else:
            return None
    enums = any(isinstance(member, type) for member in members)
    return None if not values or (str in _members(hint) and not enums) else values


def metavar(hint: Any) -> str:
    """The placeholder for the value in a help text."""
    members = [member for member in _members(hint) if member is not type(None)]
    if any(_is_dict(member) for member in members):
        return "JSON"
    if any(member is str or _is_list(member) for member in members):
        return "TEXT" if not accepts_list(hint) else "TEXT ..."
    names = {bool: "[BOOL]", int: "N", float: "X"}
    return next((names[member] for member in members if member in names), "VALUE")


def _element(hint: Any) -> Any:
    """The type of one value: that of an element if a list is expected."""
    if not accepts_list(hint):
        return hint
    list_type = next(member for member in _members(hint) if _is_list(member))
    arguments = typing.get_args(list_type)
    return arguments[0] if arguments else str


def _located(text: str, hint: Any) -> Located:
    # A text field takes the text as it is. Any other type is parsed.
    if hint is str:
        return Located(text, "command line", text)
    return read_command_line_value(text)


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(part for member in typing.get_args(hint) for part in _members(member))
    return (hint,)


def _is_list(hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, list | tuple)


def _is_dict(hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, dict)

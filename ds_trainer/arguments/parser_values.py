"""Words of a command line as values of the type of a field."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_trainer.arguments.typed import WrongType, read_as
from ds_trainer.arguments.yaml_reader import Located, read_command_line_value

_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


@dataclass(frozen=True)
class Wrong:
    """A word that is no value of its argument's type."""

    problem: str


def converter(hint: Any, flag: str) -> Callable[[str], Any]:
    """What makes a value of type ``hint`` of one word; gives a :class:`Wrong` where that fails."""
    element = _element(hint)

    def convert(word: str) -> Any:
        if is_switch(hint) and word.lower() in _TRUE + _FALSE:
            return word.lower() in _TRUE
        try:
            return read_as(_located(word, element), element)
        except WrongType as error:
            return Wrong(f"command line: {flag} {word}: {error}.")

    return convert


def is_switch(hint: Any) -> bool:
    """Whether a flag without a word means True: bool, or bool or None."""
    return bool in _members(hint) and set(_members(hint)) <= {bool, type(None)}


def accepts_list(hint: Any) -> bool:
    """Whether several words may follow, as a list."""
    return any(_is_list(member) for member in _members(hint)) and not any(
        member is str or _is_dict(member) for member in _members(hint)
    )


def metavar(hint: Any) -> str:
    """What stands for the value in a help text."""
    members = [member for member in _members(hint) if member is not type(None)]
    if any(_is_dict(member) for member in members):
        return "JSON"
    if any(member is str or _is_list(member) for member in members):
        return "TEXT" if not accepts_list(hint) else "TEXT ..."
    names = {bool: "[BOOL]", int: "N", float: "X"}
    return next((names[member] for member in members if member in names), "VALUE")


def _element(hint: Any) -> Any:
    """What one word is read as: an element where a list is expected."""
    if not accepts_list(hint):
        return hint
    found = next(member for member in _members(hint) if _is_list(member))
    arguments = typing.get_args(found)
    return arguments[0] if arguments else str


def _located(word: str, hint: Any) -> Located:
    # Text is text, whatever it looks like; only where something else may be meant is it read.
    if hint is str:
        return Located(word, "command line", word)
    return read_command_line_value(word)


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

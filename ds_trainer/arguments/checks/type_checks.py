"""Checks of argument types: whether each value fits the type hint of its field."""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from ds_trainer.arguments.enums import CHOICES
from ds_trainer.arguments.redefined import is_redefined
from ds_trainer.arguments.typed import WrongType, describe, read_as
from ds_trainer.arguments.yaml_reader import Located, parse_float
from ds_trainer.utils.files import shortened
from ds_trainer.utils.secrets import is_secret, masked, without_secrets

_FLOATS = (float, float | None)


def type_problems(args: Any) -> Iterator[str]:
    """One sentence for each field whose value does not fit its type."""
    cls: Any = type(args)
    for name, hint in _hints(cls).items():
        value = getattr(args, name)
        if name in CHOICES or is_redefined(args, name):
            continue  # a wrong choice gets the list of valid ones instead of a type
        try:
            read_as(located(value, hint), hint)
        except RecursionError:
            yield f"{name}: the mapping is nested without end; does it contain itself?"
        except WrongType as error:
            secret = is_secret(name)
            shown = f"{masked(name)}: expected {describe(hint)}" if secret else f"{_shown(value)}: {error}"
            yield f"{name}={shown}."


def _shown(value: Any) -> str:
    too_long = isinstance(value, int) and value.bit_length() > 64  # Python does not write thousands of digits
    return "(too large)" if too_long else shortened(repr(without_secrets(value)))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Type hints of the fields that this package declares. Fields of a user's subclass are not checked."""
    hints: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        if parent.__module__.startswith("ds_trainer.") and dataclasses.is_dataclass(parent):
            known = typing.get_type_hints(parent)
            hints.update({item.name: known[item.name] for item in dataclasses.fields(parent)})
    return hints


def located(value: Any, hint: Any) -> Located:
    """A Python value as the reader of files and command lines gives it, to be read by its type hint."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, dict):
        return Located({key: located(entry, Any) for key, entry in value.items()}, "")
    if isinstance(value, list | tuple | set):
        return Located([located(entry, Any) for entry in value], "")
    return Located(value, "", value if hint in _FLOATS and isinstance(value, str) else None)


def numbers_of_text(args: Any) -> dict[str, float]:
    """The numbers that the texts in fields of floats are: YAML 1.1 reads ``1e-3`` as text. Types must be right."""
    cls: Any = type(args)
    texts = {name: getattr(args, name) for name, hint in _hints(cls).items() if hint in _FLOATS}
    return {name: parse_float(text) for name, text in texts.items() if isinstance(text, str)}

"""Values read by the type hint of their field."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest

from ds_trainer.arguments.typed import WrongType, describe, read_as
from ds_trainer.arguments.yaml_reader import Located, read_command_line_value, read_yaml


class Colour(str, Enum):
    RED = "red"
    NO = "no"


def written(text: str) -> Located:
    """The value as it stands in a file."""
    located, problems = read_yaml("k: " + text, "r.yaml")
    assert problems == []
    return located.value["k"]


FITS: list[tuple[str, Any, Any]] = [
    ("5", int, 5),
    ("1e4", int, 10000),
    ("1_000", int, 1000),
    ("5", float, 5.0),
    ("1e-3", float, 1e-3),
    (".inf", float, float("inf")),
    ("true", bool, True),
    ("on", bool, True),
    ("No", bool, False),
    ("5", str, "5"),
    ("010", str, "010"),
    ("1e-3", str, "1e-3"),
    ("true", str, "true"),
    ("'a b'", str, "a b"),
    ("a/b", str | os.PathLike, "a/b"),
    ("null", str | None, None),
    ("~", Optional[int], None),  # noqa: UP045 - the spelling is what is tested
    ("5", Union[int, str], 5),  # noqa: UP007
    ("x", int | str, "x"),
    ("no", str | bool, "no"),  # a word where words are allowed
    ("false", str | bool, False),
    ("no", Literal["no", "steps"], "no"),
    ("2", Literal[1, 2], 2),
    ("red", Colour, "red"),
    ("no", Colour | str, "no"),
    ("[a, b]", list[str], ["a", "b"]),
    ("a", list[str], ["a"]),
    ("a", tuple[str, ...], ("a",)),
    ("[1, 2]", tuple[int, ...], (1, 2)),
    ("[1, 2]", str | list[int], [1, 2]),
    ("[]", list, []),
    ("{a: 1}", dict, {"a": 1}),
    ("{a: 1e-5, b: [x]}", dict[str, Any], {"a": 1e-5, "b": ["x"]}),
    ("{a: 1}", dict[str, float], {"a": 1.0}),
    ("{a: [1]}", Any, {"a": [1]}),
]


@pytest.mark.parametrize(("text", "hint", "value"), FITS)
def test_fits(text: str, hint: Any, value: Any) -> None:
    for located in (written(text), read_command_line_value(text)):
        got = read_as(located, hint)
        assert got == value
        assert type(got) is type(value)


MISFITS: list[tuple[str, Any, str]] = [
    ("many", int, "expected int, got 'many' (str)"),
    ("1.5", int, "expected int, got 1.5 (float)"),
    ("true", int, "expected int, got True (bool)"),
    ("true", float, "expected float, got True (bool)"),
    ("'1e-3'", float, "expected float, got '1e-3' (str)"),
    ("1", bool, "expected bool, got 1 (int)"),
    ("maybe", bool, "expected bool, got 'maybe' (str)"),
    ("null", str, "expected str, got null"),
    ("[a]", str, "expected str, got the list ['a']"),
    ("{a: 1}", list[str], "expected a list of str, got a mapping"),
    ("null", list[str], "expected a list of str, got null"),
    ("[1, x]", list[int], "expected a list of int, got the list [1, 'x']"),
    ("x", dict, "expected a mapping, got 'x' (str)"),
    ("{a: x}", dict[str, int], "expected a mapping, got a mapping"),
    ("x", int | None, "expected int or null, got 'x' (str)"),
    ("x", Literal["no", "steps"], "expected one of 'no', 'steps', got 'x' (str)"),
    ("true", Literal[1, 2], "expected one of 1, 2, got True (bool)"),
    ("null", Colour | str, "expected one of 'red', 'no', got null"),
]


@pytest.mark.parametrize(("text", "hint", "message"), MISFITS)
def test_misfits(text: str, hint: Any, message: str) -> None:
    with pytest.raises(WrongType) as caught:
        read_as(written(text), hint)
    assert str(caught.value) == message


def test_command_line_text_for_a_string_stays_as_typed() -> None:
    for text in ("def ", " x", "[1, 2]", "a: b", "1e-3", "'", "def f():  # c"):
        assert read_as(read_command_line_value(text), str) == text


def test_describe() -> None:
    assert describe(str | None) == "str or null"
    assert describe(tuple[str, ...]) == "a list of str"
    assert describe(int | list[int] | None) == "a list of int or int or null"

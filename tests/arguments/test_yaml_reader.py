"""Reading YAML with positions, by the core schema of YAML 1.2."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.arguments.yaml_reader import parse_float, read_command_line_value, read_yaml
from ds_trainer.utils.errors import ConfigError


def plain(text: str) -> Any:
    located, problems = read_yaml(text, "r.yaml")
    assert problems == []
    return located.plain()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("-.inf", -math.inf),
        ("12", 12),
        ("1_000", 1000),
        ("010", 10),  # octal in YAML 1.1
        ("12:30", "12:30"),  # 750 in YAML 1.1
        ("2026-01-31", "2026-01-31"),  # a date in YAML 1.1
        ("no", "no"),  # a bool in YAML 1.1
        ("off", "off"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("0x10", "0x10"),
        ("[a, 1, 1e-5]", ["a", 1, 1e-5]),
        ("{a: {b: yes}}", {"a": {"b": "yes"}}),
        ("<<", "<<"),
        ("e5", "e5"),
        (".", "."),
        ("-", [None]),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert plain("k: " + text if text != "-" else "k:\n-") == {"k": value}


def test_nan() -> None:
    assert math.isnan(plain("k: .nan")["k"])


@given(st.floats(allow_nan=False))
def test_floats_survive_a_round_trip(value: float) -> None:
    text = repr(value).replace("inf", ".inf")
    assert parse_float(text) == value
    assert plain(f"k: {text}")["k"] == value


def test_positions() -> None:
    located, _ = read_yaml("a: 1\nb:\n  c:\n    - x\n    - y\n", "r.yaml")
    assert located.value["a"].where == "r.yaml:1"
    assert located.value["b"].where == "r.yaml:2"
    assert located.value["b"].value["c"].where == "r.yaml:3"
    assert located.value["b"].value["c"].value[1].where == "r.yaml:5"


def test_text_is_kept_of_plain_scalars_only() -> None:
    located, _ = read_yaml("a: 1_000\nb: '5'\nc: [1]\n", "r.yaml")
    assert [located.value[key].text for key in "abc"] == ["1_000", None, None]


def test_empty_document_is_an_empty_mapping() -> None:
    assert plain("# nothing\n") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"r.yaml:3: duplicate key 'a', first given on line 1"),
        ("a: &x [*x]\n", r"r.yaml:1: an alias refers to a value that contains it"),
        ("a: 1\n? [b]\n: 2\n", r"r.yaml:2: a key must be text"),
        ("a: !!python/object:os.system x\n", r"r.yaml:1: the tag .*os.system"),
        ("a: !!int x\n", r"r.yaml:1: 'x' is not a valid int"),
    ],
)
def test_problems_have_their_line(text: str, message: str) -> None:
    _, problems = read_yaml(text, "r.yaml")
    assert len(problems) == 1
    assert re.match(message, problems[0])


def test_all_duplicates_are_found() -> None:
    _, problems = read_yaml("a: 1\na: 1\nb: {c: 1, c: 2}\n", "r.yaml")
    assert len(problems) == 2


def test_an_anchor_may_be_used_twice() -> None:
    assert plain("a: &x [1]\nb: *x\n") == {"a": [1], "b": [1]}


@pytest.mark.parametrize("text", ["a: [1\nb: 2", "a: 'x", "a: b: c", "\ta: 1", "a: \x01"])
def test_invalid_yaml_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^r\.yaml(:\d+)?: not valid YAML: ") as caught:
        read_yaml(text, "r.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("[a, b]", ["a", "b"]),
        ("{a: 1}", {"a": 1}),
        ("-1", -1),
        ("null", None),
        ("", ""),
        ("def f(x", "def f(x"),
        ("a: b: c", "a: b: c"),
        ("# x", "# x"),
        ("'5'", "5"),
    ],
)
def test_command_line_values(text: str, value: Any) -> None:
    located = read_command_line_value(text)
    assert located.plain() == value
    assert located.where == "command line"


@given(st.text(max_size=20))
def test_any_text_can_stand_on_the_command_line(text: str) -> None:
    located = read_command_line_value(text)
    assert located.text in (text, None)
    assert located.text is not None or isinstance(located.value, str)

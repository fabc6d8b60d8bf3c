"""The user's own DeepSpeed file: hjson read by hjson, with the line of every key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.user_config import read_user_config
from ds_trainer.utils.errors import ConfigError

TEXT = """// a comment
{
  # another
  "zero_optimization": {
    stage: 3   // after a value
    "offload_param": {"device": "cpu",
       "pin_memory": true},
    list: [1, {"a": 2},
           "x"],
  },
  /* a block
     of them */
  "bf16": { "enabled": "auto" }
  lr: 1e-5
  multi:
    '''
    two
    lines
    '''
  word: some words
}
"""
LOCATIONS = {
    "zero_optimization": 4,
    "zero_optimization.stage": 5,
    "zero_optimization.offload_param": 6,
    "zero_optimization.offload_param.device": 6,
    "zero_optimization.offload_param.pin_memory": 7,
    "zero_optimization.list": 8,
    "bf16.enabled": 13,
    "lr": 14,
    "multi": 15,
    "word": 20,
}


def node_at(root: Located, path: str) -> Located:
    for name in path.split("."):
        root = root.value[name]
    return root


def test_every_key_knows_its_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.hjson"
    file.write_text(TEXT)
    root, problems = read_user_config(file)
    assert problems == []
    assert {path: node_at(root, path).where for path in LOCATIONS} == {
        path: f"{file}:{n}" for path, n in LOCATIONS.items()
    }
    assert root.plain() == dict(hjson.loads(TEXT))
    assert root.plain()["zero_optimization"]["list"] == [1, {"a": 2}, "x"]
    assert (root.plain()["lr"], root.plain()["word"], root.plain()["multi"]) == (1e-5, "some words", "two\nlines")


def test_text_and_mappings() -> None:
    root, _ = read_user_config('{"bf16":\n {"enabled": true}}')
    assert node_at(root, "bf16.enabled").where == "deepspeed:2"
    root, _ = read_user_config({"bf16": {"enabled": True}, "betas": (0.9, 0.99)})
    assert node_at(root, "bf16.enabled").where == "deepspeed.bf16.enabled"
    assert root.plain() == {"bf16": {"enabled": True}, "betas": [0.9, 0.99]}
    assert read_user_config("{}")[0].plain() == {}
    assert read_user_config({})[0].plain() == {}


def test_whole_numbers_are_integers_from_mappings_too() -> None:
    root, _ = read_user_config({"steps": 10.0, "ratio": 0.5, "sizes": [5e8]})
    assert [type(entry) for entry in (root.plain()["steps"], root.plain()["ratio"], root.plain()["sizes"][0])] == [
        int,
        float,
        int,
    ]


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_bytes(b'\xef\xbb\xbf{"bf16": {}}')
    assert read_user_config(tmp_path / "ds.json")[0].plain() == {"bf16": {}}


def test_braces_around_everything_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "ds.hjson").write_text("bf16: {\n  enabled: true\n}\ngradient_clipping: 0.5\n")
    root, problems = read_user_config(str(tmp_path / "ds.hjson"))
    assert problems == []
    assert root.plain() == {"bf16": {"enabled": True}, "gradient_clipping": 0.5}
    assert node_at(root, "bf16.enabled").where.endswith("ds.hjson:2")


def test_the_home_directory_and_windows_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ds.json").write_bytes(b'{\r\n"bf16": {},\r\n"fp16": {}}')
    root, _ = read_user_config("~/ds.json")
    assert node_at(root, "fp16").where == "~/ds.json:3"


def test_the_line_is_that_of_the_key() -> None:
    """Not of its colon, of its value, or of a comment between."""
    root, _ = read_user_config('{"bf16"\n:\n{"enabled": // not: here\n\n true} /* nor: here\n*/ , # x\n list: [\n1\n]}')
    assert [node_at(root, path).where for path in ("bf16", "bf16.enabled", "list")] == [
        "deepspeed:1",
        "deepspeed:3",
        "deepspeed:7",
    ]


def test_a_path_in_a_mapping_is_text(tmp_path: Path) -> None:
    root, _ = read_user_config({"zero_optimization": {"offload_param": {"nvme_path": tmp_path}}})
    assert root.plain()["zero_optimization"]["offload_param"]["nvme_path"] == str(tmp_path)


def test_a_mapping_is_not_changed() -> None:
    mapping = {"bf16": {"enabled": "auto"}, "list": [{"a": 1}]}
    before = json.dumps(mapping)
    root, _ = read_user_config(mapping)
    root.value["bf16"].value["enabled"] = Located(True, "elsewhere")
    assert json.dumps(mapping) == before


# -- problems after which reading continues -------------------------------------------------------------------


def test_keys_given_twice() -> None:
    root, problems = read_user_config('{"a": 1,\n"b": {"c": 1,\n"c": 2},\n"a": 3}')
    assert problems == [
        "deepspeed:3: duplicate key 'c', first given in deepspeed:2; remove one.",
        "deepspeed:4: duplicate key 'a', first given in deepspeed:1; remove one.",
    ]
    assert root.plain() == {"a": 3, "b": {"c": 2}}
    _, problems = read_user_config('[{"a": 1, "a": 2}]'.join(['{"list": ', "}"]))
    assert problems == ["deepspeed:1: duplicate key 'a', first given in deepspeed:1; remove one."]


TO_THE_END = "extends to the end of the line; put quotes around it."
COMMA = "extends to the end of the line; is a comma missing?"
UNQUOTED = [
    ('{"a": auto,\n"b": 1 # fine\n}', f"deepspeed:1: the unquoted string 'auto,' {TO_THE_END}"),
    ('{"a": 1,\n"b": {"c": cpu}\n}', f"deepspeed:2: the unquoted string 'cpu}}' {TO_THE_END}"),
    ('{"a": [auto, 1]\n}', f"deepspeed:1: the unquoted string 'auto, 1]' {TO_THE_END}"),
    ("{device: cpu # the host\n}", f"deepspeed:1: the unquoted string 'cpu # the host' {TO_THE_END}"),
    ("{device: cpu // the host\n}", f"deepspeed:1: the unquoted string 'cpu // the host' {TO_THE_END}"),
    ("{device: cpu /* the host */\n}", f"deepspeed:1: the unquoted string 'cpu /* the host */' {TO_THE_END}"),
    ("{device: cpu, pin_memory: true\n}", f"deepspeed:1: the unquoted string 'cpu, pin_memory: true' {COMMA}"),
    ("{device: cpu pin_memory: true\n}", f"deepspeed:1: the unquoted string 'cpu pin_memory: true' {COMMA}"),
    ('{"a": 1 "b": 2}', f"""deepspeed:1: the unquoted string '1 "b": 2}}' {COMMA}"""),
    ('{"a": True}', f"deepspeed:1: the unquoted string 'True}}' {TO_THE_END}"),
    ('{"a": 1_000}', f"deepspeed:1: the unquoted string '1_000}}' {TO_THE_END}"),
    ('{"a": NaN}', f"deepspeed:1: the unquoted string 'NaN}}' {TO_THE_END}"),
]


@pytest.mark.parametrize(("text", "message"), UNQUOTED, ids=[text for text, _ in UNQUOTED])
def test_unquoted_text_that_swallows_the_rest_of_its_line(text: str, message: str) -> None:
    """hjson reads it as text, brace, comma and comment included: never what was meant. Some also fail to parse."""
    try:
        _, problems = read_user_config(text)
    except ConfigError as error:
        problems = error.problems
    assert problems == [message]


def test_an_empty_key() -> None:
    _, problems = read_user_config('{"bf16": {\n"": 1}}')
    assert problems == ["deepspeed:2: a key must not be empty."]


# -- what cannot be read ---------------------------------------------------------------------------------------------

BROKEN = [
    ('{"a": 1', "1:8: the text ends inside braces; is a closing brace missing?"),
    ('{"a": {\n"b": 1}\n', "3:1: the text ends inside braces; is a closing brace missing?"),
    ('{"a": 1}}', "1:9: text after the end of the configuration; is there a closing brace too many?"),
    ('{"a": 1}\n{"b": 1}', "2:1: text after the end of the configuration; is there a closing brace too many?"),
    ('{"a": [1, 2}', "1:12: '}' instead of a value."),
    ('{"a": [1, 2', "1:12: the text ends where a value is expected; is a value or a bracket missing?"),
    ('{"a": [', "1:8: the text ends inside a list; is a closing bracket missing?"),
    ('{"a": }', "1:7: '}' instead of a value."),
    ('{"a":', "1:6: the text ends where a value is expected; is a value or a bracket missing?"),
    ('{"a"}', "1:5: a ':' is missing after the key."),
    ('{"a" = 1}', "1:6: a ':' is missing after the key."),
    ("{: 1}", "1:2: a ':' without a key before it."),
    ('{"a": 1,, "b": 2}', "1:9: a brace, bracket or comma instead of a key; is there one too many?"),
    ("{a b: 1}", "1:3: a space in a key; is a comma missing before it, or are quotes missing?"),
    ('{"a": "x}', "1:7: a string without a closing quote."),
    ('{\n"a": "x\n}', "2:8: a string with a line break or control character; is its closing quote missing?"),
    ('{"a": "C:\\data"}', "1:11: \\ before 'd' in a string; write \\\\ for a backslash."),
    ('{"a": "\\u12"}', "1:8: \\u in a string needs four hexadecimal digits."),
    ('{"a": 1,\n"b": 1e400}', "2:6: a number that is too large."),
    (f'{{"a": {"9" * 5000}}}', "1:7: a number that is too large."),
    ('{\n"a": 1 /* no end', "2: a comment /* without an end."),
    ("{\na: '''no end", "2:13: a string in ''' without an end."),
    ("{\na: '''", "2: a string in ''' without an end."),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=[text[:30] for text, _ in BROKEN])
def test_broken_syntax_is_named_with_line_and_column(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_user_config(text)
    assert error.value.problems == [f"deepspeed:{message}"]
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_user_config(tmp_path / "ds.json")
    assert error.value.problems == [f"{tmp_path}/ds.json:{message}"]


@pytest.mark.parametrize("text", ['{"a": ' * 3000, '{"a": ' + "[" * 100_000])
def test_deep_nesting_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^deepspeed cannot be parsed: brackets are nested too deeply\.$"):
        read_user_config(text)


EMPTY = "{} is empty; write {{}} for a configuration without settings."
CONTENT = [
    (b"", EMPTY),
    (b" \n\n", EMPTY),
    (b"// only a comment\n", EMPTY),
    (b"[1, 2]", "{}: a DeepSpeed configuration is a mapping in braces, not [1, 2]."),
    (b'[{"bf16": {}}]', "{}: a DeepSpeed configuration is a mapping in braces, not [{{'bf16': {{}}}}]."),
    (b'"text"', "{}: a DeepSpeed configuration is a mapping in braces, not 'text'."),
    (b"3", "{}: a DeepSpeed configuration is a mapping in braces, not 3."),
    (b"\xff\xfe{\x00}\x00", "deepspeed={} is not UTF-8 text (byte 0); is it a JSON file?"),
    (b'{"a": "\xe9"}', "deepspeed={} is not UTF-8 text (byte 7); is it a JSON file?"),
]


@pytest.mark.parametrize(("content", "message"), CONTENT, ids=[repr(content) for content, _ in CONTENT])
def test_empty_files_are_rejected(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_user_config(file)
    assert error.value.problems == [message.format(file)]


def test_a_missing_file_is_reported_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source, message in (
        ("nowhere.json", f"deepspeed=nowhere.json does not exist (working directory: {tmp_path})."),
        (str(tmp_path), f"deepspeed={tmp_path} is a directory; name a JSON file in it."),
        ("", "deepspeed='' names no file; leave it out to run without a file."),
        ("a\0b", "deepspeed='a\\x00b' cannot be read: embedded null byte."),
        ("x" * 5000, "xxx (5,010 characters) cannot be read: File name too long."),
        ("~nobody-of-this-name/ds.json", "does not exist (working directory:"),
    ):
        with pytest.raises(ConfigError) as error:
            read_user_config(source)
        assert len(error.value.problems) == 1
        assert message in error.value.problems[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "ds.json").chmod(0)
    with pytest.raises(ConfigError, match=r"cannot be read: Permission denied\.$"):
        read_user_config(tmp_path / "ds.json")


@pytest.mark.parametrize("key", [1, None, True, "", ("a", "b")])
def test_keys_are_text(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"deepspeed\.bf16: the key .* must be a string that is not empty"):
        read_user_config({"bf16": {key: 1}})


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", 1j])
def test_values_are_those_of_json(value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        read_user_config({"bf16": {"enabled": [value]}})
    (problem,) = error.value.problems
    assert problem.startswith(
        f"deepspeed.bf16.enabled={value!r} is of type {type(value).__name__}; write a number, string"
    )


def test_a_recursive_mapping_is_rejected() -> None:
    mapping: dict[str, Any] = {}
    mapping["zero_optimization"] = mapping
    with pytest.raises(ConfigError, match="does it contain itself"):
        read_user_config(mapping)


@pytest.mark.parametrize("source", [3.5, 3, True, b"{}", ["ds.json"]])
def test_other_types_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError) as error:
        read_user_config(source)
    assert str(error.value) == (
        f"deepspeed={source!r} must be the path of a JSON or hjson file, its text, or a mapping, not a "
        f"{type(source).__name__}."
    )


# -- whatever is written ---------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text(max_size=8)
keys = st.text(min_size=1, max_size=6)
values = st.recursive(scalars, lambda below: st.lists(below, max_size=3) | st.dictionaries(keys, below, max_size=3))


@given(st.dictionaries(keys, values, max_size=4))
def test_json_is_read_as_it_is(mapping: dict[str, Any]) -> None:
    """Whatever json writes comes back equal (hjson makes integers of floats such as 2.0, which are equal)."""
    root, problems = read_user_config(json.dumps(mapping, indent=1))
    assert root.plain() == mapping
    assert problems == []


@given(st.text(alphabet="{}[]:,\"'\\/*#\n\t ab1-.e", max_size=40))
def test_any_text_is_read_or_rejected_with_a_message(text: str) -> None:
    try:
        root, problems = read_user_config("{" + text)
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(root.plain(), dict) and all(isinstance(problem, str) for problem in problems)

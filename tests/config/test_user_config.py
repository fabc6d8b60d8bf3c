"""The user's own DeepSpeed file: hjson read by hjson, with the line of every key."""

from __future__ import annotations

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
PLACES = {
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


def at(root: Located, path: str) -> Located:
    for name in path.split("."):
        root = root.value[name]
    return root


def test_every_key_knows_its_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.hjson"
    file.write_text(TEXT)
    root, problems = read_user_config(file)
    assert problems == []
    assert {path: at(root, path).where for path in PLACES} == {path: f"{file}:{n}" for path, n in PLACES.items()}
    assert root.plain() == dict(hjson.loads(TEXT))
    assert root.plain()["zero_optimization"]["list"] == [1, {"a": 2}, "x"]
    assert (root.plain()["lr"], root.plain()["word"], root.plain()["multi"]) == (1e-5, "some words", "two\nlines")


def test_text_and_mappings() -> None:
    root, _ = read_user_config('{"bf16":\n {"enabled": true}}')
    assert at(root, "bf16.enabled").where == "deepspeed:2"
    root, _ = read_user_config({"bf16": {"enabled": True}, "betas": (0.9, 0.99)})
    assert at(root, "bf16.enabled").where == "deepspeed.bf16.enabled"
    assert root.plain() == {"bf16": {"enabled": True}, "betas": [0.9, 0.99]}
    assert read_user_config("{}")[0].plain() == {}
    assert read_user_config({})[0].plain() == {}


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_bytes(b'\xef\xbb\xbf{"bf16": {}}')
    assert read_user_config(tmp_path / "ds.json")[0].plain() == {"bf16": {}}


def test_what_can_be_gone_on_after() -> None:
    root, problems = read_user_config('{"a": 1,\n"b": {"c": 1,\n"c": 2},\n"a": 3}')
    assert problems == [
        "deepspeed:3: duplicate key 'c', first given in deepspeed:2; remove one.",
        "deepspeed:4: duplicate key 'a', first given in deepspeed:1; remove one.",
    ]
    assert root.plain() == {"a": 3, "b": {"c": 2}}
    _, problems = read_user_config('{"a": auto,\n"b": 1 # fine\n}')
    assert problems == ["deepspeed:1: the unquoted text 'auto,' goes to the end of the line; put quotes around it."]


@pytest.mark.parametrize("key", [1, None, True])
def test_keys_are_text(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"deepspeed\.bf16: the key .* must be a string"):
        read_user_config({"bf16": {key: 1}})


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"deepspeed=3\.5 must be the path of a JSON or hjson file"):
        read_user_config(3.5)


scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


@given(st.dictionaries(st.text(max_size=6), values, max_size=4))
def test_json_is_read_as_it_is(mapping: dict[str, Any]) -> None:
    """Whatever json writes comes back equal (hjson makes integers of floats such as 2.0, which are equal)."""
    import json

    root, problems = read_user_config(json.dumps(mapping, indent=1))
    assert root.plain() == mapping
    assert problems == []

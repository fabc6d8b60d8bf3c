"""Files that are valid, or look so, and must neither lose samples nor give others."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.fine_tuning_data import open_text_sources
from ds_trainer.recipes.language_model_job import Corpus
from ds_trainer.samples.sources.record import BadLines, Record
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError
from tests.samples.sources.bad_inputs import GOOD

CONVERSATION = json.loads(GOOD["messages"])


def read(path: Path) -> tuple[list[Record], list[str]]:
    bad = BadLines()
    records = list(Source(SourceSpec(path=(str(path),)), "data.train").read(bad))
    return records, [problem.replace(f"{path.parent}/", "") for problem in bad.problems()]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (json.dumps(CONVERSATION, indent=1) * 2, 1 + json.dumps(CONVERSATION, indent=1).count("\n")),
        ("\n".join([json.dumps(CONVERSATION, indent=1)] * 2), 2 + json.dumps(CONVERSATION, indent=1).count("\n")),
        (f"[{json.dumps(CONVERSATION)}]\n[{json.dumps(CONVERSATION)}]\n", 2),
    ],
    ids=["objects", "lines", "lists"],
)
def test_what_follows_a_json_value_is_not_lost_in_silence(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "x.json").write_text(text)
    _, problems = read(tmp_path / "x.json")
    assert len(problems) == 1
    assert problems[0].startswith(f"x.json:{line}: not valid JSON: a second value follows the first")


def test_white_space_after_a_json_value_is_nothing(tmp_path: Path) -> None:
    for text in (json.dumps(CONVERSATION, indent=1), json.dumps([CONVERSATION])):
        (tmp_path / "x.json").write_text(f"\n{text}\r\n \t\n")
        records, problems = read(tmp_path / "x.json")
        assert (len(records), problems) == (1, [])


def test_a_link_is_read_as_what_it_is_called(tmp_path: Path) -> None:
    """The cache of the Hub has links to files whose names are hashes."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "snapshot" / "cat.png")
    picture = {**CONVERSATION, "images": ["cat.png"]}
    (tmp_path / "blobs" / "0a1b").write_bytes(gzip.compress(json.dumps(picture).encode()))
    link = tmp_path / "snapshot" / "x.jsonl.gz"
    link.symlink_to("../blobs/0a1b")
    for path in (link, tmp_path / "snapshot" / "*.gz"):
        records, problems = read(path)
        assert problems == []
        assert [record.source for record in records] == [f"{link}:1"]
        assert records[0].fields["images"] == [str(tmp_path / "snapshot" / "cat.png")]


def test_a_file_under_two_names_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.jsonl").write_bytes(GOOD["messages"])
    (tmp_path / "data" / "y.jsonl").symlink_to("x.jsonl")
    (tmp_path / "data" / "itself").symlink_to(".")
    assert len(read(tmp_path / "data")[0]) == 1
    assert len(read(tmp_path / "data" / "**" / "*.jsonl")[0]) == 1


def test_a_file_of_evaluation_is_not_trained_on_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(GOOD["messages"])
    (tmp_path / "y.jsonl").symlink_to("x.jsonl")
    spec = DataSpec(train=(str(tmp_path / "x.jsonl"),), eval=(str(tmp_path / "y.jsonl"),), max_length=8)
    with pytest.raises(ConfigError, match=r"also in data\.eval"):
        open_text_sources(spec)


def test_a_weight_beside_an_empty_column_counts(tmp_path: Path) -> None:
    """A table has every key in every row."""
    ask, say = CONVERSATION["messages"]
    turns = [ask, {**say, "train": None, "weight": 0}, ask, {**say, "train": None, "weight": 1}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": turns}))
    records, _ = read(tmp_path / "x.jsonl")
    assert [turn.get("train") for turn in records[0].fields["messages"]] == [None, False, None, True]


def test_null_in_arguments_that_are_json_is_kept(tmp_path: Path) -> None:
    call = {"function": {"name": "look", "arguments": '{"at": null, "all": [{"deep": null}]}'}}
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": turns}))
    records, _ = read(tmp_path / "x.jsonl")
    found = records[0].fields["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert found == {"at": None, "all": [{"deep": None}]}


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_a_table_in_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes("prompt,completion\na,b\n".encode("utf-16"))
    assert read(tmp_path / name)[1] == [f"{name}: is UTF-16; convert it to UTF-8."]


def test_a_first_line_of_a_table_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("prompt,complétion\na,b\n".encode("latin-1"))
    _, problems = read(tmp_path / "x.csv")
    assert problems == ["x.csv:1: not UTF-8 text."]


def test_a_file_whose_name_is_no_text_is_refused_in_words_that_can_be_printed(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    Path(name).write_bytes(GOOD["messages"])
    with pytest.raises(ConfigError, match="not UTF-8; rename it") as caught:
        read(tmp_path)
    assert "caf\\xe9.jsonl" in str(caught.value).encode("utf-8").decode()


def problems_of(value: Any) -> list[str]:
    return DataSpec(train=("x",), max_length=8, held_out=value).problems()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -3, 1.5])
def test_a_part_to_hold_out_that_is_none_is_refused(value: Any) -> None:
    assert [problem.partition(" must")[0] for problem in problems_of(value)] == [f"data.held_out={value}"]


def test_a_document_of_evaluation_is_not_trained_on_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some words")
    (tmp_path / "y.txt").symlink_to("x.txt")
    spec = DataSpec(train=(str(tmp_path / "x.txt"),), eval=(str(tmp_path / "y.txt"),), sequence_length=8)
    with pytest.raises(ConfigError, match=r"also in data\.eval"):
        Corpus(spec)

"""Sources: files of every format become the same records; detection, limits, names."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ds_trainer.samples.sources.record import BadLines, Record
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError

ROWS = [{"prompt": f"{n} + 1 = é", "completion": f'"{n + 1}",\nsure'} for n in range(5)]


def read(path: Path | str, **spec: Any) -> list[Record]:
    bad = BadLines()
    source = Source(SourceSpec(path=(str(path),), **spec), "data.train")
    records = list(source.read(bad))
    bad.check()
    return records


def write_all(folder: Path) -> dict[str, Path]:
    """The same rows in every format."""
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    contents = {
        "a.jsonl": lines,
        "bom.jsonl": b"\xef\xbb\xbf" + lines,
        "a.ndjson": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.bz2": bz2.compress(lines),
        "a.jsonl.xz": lzma.compress(lines),
        "a.jsonl.zst": pyarrow.compress(lines, "zstd", asbytes=True),
        "list.json": json.dumps(ROWS, indent=2).encode(),
        "short.json": json.dumps(ROWS).encode(),
        "object.json": json.dumps({"version": 1, "data": ROWS}).encode(),
        "lines.json": lines,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    with pyarrow.ipc.new_file(folder / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    with pyarrow.ipc.new_stream(folder / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    names = [*contents, "a.csv", "a.tsv", "a.parquet", "file.arrow", "stream.arrow", "saved"]
    return {name: folder / name for name in names}


def test_every_format_gives_the_same_records(tmp_path: Path) -> None:
    for name, path in write_all(tmp_path).items():
        records = read(path)
        assert [record.fields for record in records] == ROWS, name
        assert {record.kind for record in records} == {"prompt_completion"}, name
        assert all(record.source.startswith(str(path)) for record in records)


def test_places_are_lines_and_rows(tmp_path: Path) -> None:
    paths = write_all(tmp_path)
    places = {name: [record.source.removeprefix(str(path)) for record in read(path)] for name, path in paths.items()}
    assert places["a.jsonl"] == places["a.jsonl.gz"] == [f":{n}" for n in range(1, 6)]
    assert places["a.csv"] == [f":{2 + 2 * n}" for n in range(5)]  # each row has a line break
    assert places["list.json"] == [f":{2 + 4 * n}" for n in range(5)]
    assert places["a.parquet"] == places["saved"] == places["object.json"] == [f", row {n}" for n in range(1, 6)]


@pytest.mark.parametrize(
    ("row", "kind", "fields"),
    [
        ({"text": "x", "id": 7}, "text", {"text": "x"}),
        ({"content": "x"}, "text", {"text": "x"}),
        ({"prompt": "a", "completion": "b"}, "prompt_completion", {"prompt": "a", "completion": "b"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", None),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            "messages",
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
            },
        ),
        (
            {"instruction": "a", "input": "b", "output": "c", "system": "", "history": [["d", "e"]]},
            "messages",
            {
                "messages": [
                    {"role": "user", "content": "d"},
                    {"role": "assistant", "content": "e"},
                    {"role": "user", "content": "a\n\nb"},
                    {"role": "assistant", "content": "c"},
                ]
            },
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]},
            "messages",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": False}]},
        ),
        (
            {
                "tools": '[{"name": "f"}]',
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "2"},
                ],
            },
            "messages",
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
                    },
                    {"role": "tool", "content": "2"},
                ],
                "tools": [{"name": "f"}],
            },
        ),
        *(
            (
                {question: "a", answer: "b"},
                "messages",
                {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            )
            for question, answer in (
                ("question", "answer"),
                ("query", "response"),
                ("prompt", "response"),
                ("problem", "solution"),
                ("input", "output"),
            )
        ),
    ],
)
def test_formats_are_recognized_by_their_keys(tmp_path: Path, row: Any, kind: str, fields: Any) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    (record,) = read(tmp_path / "x.jsonl")
    assert record.kind == kind
    assert fields is None or record.fields == fields


def test_images_are_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "pictures" / "a.png")
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": turns, "images": ["pictures/a.png"]}))
    (record,) = read(tmp_path / "x.jsonl")
    assert record.fields["images"] == [str((tmp_path / "pictures" / "a.png").resolve())]


def test_a_directory_of_data_files_without_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    assert [record.fields["text"] for record in read(tmp_path)] == ["a", "b"]


def test_text_files_are_one_sample_each(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    assert [record.fields["text"] for record in read(f"{tmp_path}/*.txt")] == ["text a", "text b"]


def test_a_limit_takes_the_first_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n}"}) + "\n" for n in range(9)) + "bad\n")
    assert [record.fields["text"] for record in read(path, limit=4)] == ["0", "1", "2", "3"]


def test_a_source_describes_itself(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n' * 617
        )
    source = Source(SourceSpec(path=(str(tmp_path),), name="chats"), "data.train[0]")
    list(source.read(BadLines()))
    assert source.describe() == "data.train[0] (chats): 1,234 records of conversations (ShareGPT) in 2 files"


def test_all_files_of_training_are_for_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match=r"no training data: 1 file is also in data.eval"):
        Source(SourceSpec(path=(str(path),)), "data.train", {path.resolve()})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_a_positive_number(weight: float) -> None:
    (problem,) = SourceSpec(path=("x",), weight=weight).problems()
    assert problem.startswith(f"weight={weight} must be a positive number")
    assert SourceSpec(path=("x",), weight=0.5).problems() == []

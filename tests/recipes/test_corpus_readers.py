"""The readers of all formats, on valid and malformed files."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_trainer.recipes.corpus_readers import Document, read_dataset, read_jsonl, read_parquet, read_text
from ds_trainer.utils.errors import ConfigError


def refused(reader: Callable[..., object], path: Path, key: str = "text") -> str:
    with pytest.raises(ConfigError) as caught:
        list(reader(path, key))  # type: ignore[call-overload]
    return str(caught.value).replace(f"{path.parent}/", "")


def test_text_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9\r\n\x00")
    assert list(read_text(path, "")) == [Document(str(path), b"caf\xe9\r\n\x00")]


def test_compressed_text(tmp_path: Path) -> None:
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(b"hello"))
    assert [document.data for document in read_text(path, "")] == [b"hello"]
    path.write_bytes(gzip.compress(b"hello" * 100)[:-12])
    assert "x.txt.gz cannot be read: EOFError" in refused(read_text, path)
    path.write_bytes(b"no gzip")
    assert "x.txt.gz cannot be read: BadGzipFile" in refused(read_text, path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    assert "Permission denied" in refused(read_text, path)


def test_a_file_that_vanished(tmp_path: Path) -> None:
    assert refused(read_text, tmp_path / "gone.txt") == "gone.txt cannot be read: No such file or directory."


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = b'{"text": "one"}\n\n   \n{"n": 1, "text": "z\\u00e9 \\n"}'
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert list(read_jsonl(path, "text")) == [
        Document(f"{path}:1", b"one"),
        Document(f"{path}:4", "zé \n".encode()),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', r"x.jsonl:2: not valid JSON: .*; each line must be one JSON object"),
        ("plain words", r"x.jsonl:2: not valid JSON: Expecting value"),
        ('["x"]', r"x.jsonl:2: expected a JSON object with the key 'text', got list"),
        (
            '{"txt": "x", "id": 1}',
            r"x.jsonl:2: no key 'text'; found 'txt', 'id'. Set data.text_key .* Did you mean 'txt'",
        ),
        ("{}", r"x.jsonl:2: no key 'text'; found none"),
        ('{"text": 5}', r"x.jsonl:2: 'text' must be a string, got int"),
        ('{"text": null}', r"x.jsonl:2: 'text' must be a string, got null"),
        ('{"text": "\\ud800"}', r"x.jsonl:2: 'text' cannot be encoded as UTF-8: surrogates not allowed"),
    ],
)
def test_malformed_lines_are_reported(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    assert re.match(message, refused(read_jsonl, path))


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    assert "x.jsonl:1: not valid JSON" in refused(read_jsonl, path)


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    table = pyarrow.table({"body": [f"r{number}" for number in range(2500)], "n": list(range(2500))})
    pyarrow.parquet.write_table(table, path, row_group_size=1000)
    documents = list(read_parquet(path, "body"))
    assert [document.data.decode() for document in documents] == [f"r{number}" for number in range(2500)]
    assert documents[-1].source == f"{path}: row 2500"
    assert "x.parquet: no column 'text'; found 'body', 'n'" in refused(read_parquet, path)
    assert "x.parquet: row 1: 'n' must be a string, got int" in refused(read_parquet, path, "n")
    path.write_bytes(path.read_bytes()[:100])
    assert "x.parquet cannot be read" in refused(read_parquet, path, "body")
    path.write_bytes(b"")
    assert "x.parquet cannot be read" in refused(read_parquet, path, "body")


def test_parquet_with_a_null(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    assert "x.parquet: row 2: 'text' must be a string, got null" in refused(read_parquet, path)


def test_saved_dataset(tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "rows"
    Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]}).with_format("torch").save_to_disk(str(path))
    assert [document.data for document in read_dataset(path, "text")] == [b"a", b"b"]
    assert "rows: no column 'body'; found 'text', 'n'" in refused(read_dataset, path, "body")
    (path / "state.json").write_text(json.dumps({"broken": True}))
    assert "rows cannot be read" in refused(read_dataset, path)

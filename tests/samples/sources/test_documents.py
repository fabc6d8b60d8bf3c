"""The documents of all formats, from valid and malformed files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from ds_trainer.samples.sources.documents import Document, read_documents
from ds_trainer.samples.sources.files import SourceFile
from ds_trainer.samples.sources.record import BadLines
from ds_trainer.utils.errors import ConfigError


def read(path: Path, format: str, key: str = "text") -> list[Document]:
    bad = BadLines()
    documents = [document for document in read_documents(SourceFile(path, format), key, bad) if document is not None]
    bad.check()
    return documents


def refused(path: Path, format: str, key: str = "text") -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, format, key)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_text_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9\r\n\x00")
    assert read(path, "text") == [Document(str(path), b"caf\xe9\r\n\x00")]


def test_compressed_text(tmp_path: Path) -> None:
    import pyarrow

    for suffix, compress in (
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
        ("zst", lambda data: pyarrow.compress(data, "zstd", asbytes=True)),
    ):
        path = tmp_path / f"x.txt.{suffix}"
        path.write_bytes(compress(b"hello" * 100))
        assert [document.data for document in read(path, "text")] == [b"hello" * 100]
        whole = compress(os.urandom(5000))
        path.write_bytes(whole[: len(whole) // 2])
        assert f"x.txt.{suffix}: cannot be read" in refused(path, "text"), suffix
        path.write_bytes(b"not compressed")
        assert f"x.txt.{suffix}: cannot be read" in refused(path, "text"), suffix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    assert "Permission denied" in refused(path, "text")


def test_a_file_that_vanished(tmp_path: Path) -> None:
    assert refused(tmp_path / "gone.txt", "text") == "gone.txt: cannot be read: No such file or directory."


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = b'{"text": "one"}\n\n   \n{"n": 1, "text": "z\\u00e9 \\n"}'
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read(path, "jsonl") == [Document(f"{path}:1", b"one"), Document(f"{path}:4", "zé \n".encode())]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "x.jsonl:2: not valid JSON: Expecting ',' delimiter (column"),
        ("plain words", "x.jsonl:2: not valid JSON: Expecting value"),
        ('["x"]', "x.jsonl:2: expected a JSON object with the key 'text', got a list"),
        ('{"txt": "x", "id": 1}', "x.jsonl:2: no key 'text'; found 'txt', 'id'. Set text_key to the one with"),
        ('{"txt": "x"}', "Did you mean 'txt'?"),
        ("{}", "x.jsonl:2: no key 'text'; found none"),
        ('{"text": 5}', "x.jsonl:2: 'text' must be a string, got a number"),
        ('{"text": null}', "x.jsonl:2: 'text' must be a string, got null"),
        ('{"text": "\\ud800"}', "x.jsonl:2: 'text' cannot be encoded as UTF-8: surrogates not allowed"),
    ],
)
def test_malformed_lines_are_reported(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    assert message in refused(path, "jsonl")


def test_all_malformed_lines_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n{"text": 1}\n{"text": "good"}\n{\n')
    message = refused(path, "jsonl")
    assert "3 problems" in message
    for part in ("x.jsonl:1: not UTF-8 text (byte 11", "x.jsonl:2: 'text' must be", "x.jsonl:4: not valid JSON"):
        assert part in message


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    table = pyarrow.table({"body": [f"r{number}" for number in range(2500)], "n": list(range(2500))})
    pyarrow.parquet.write_table(table, path, row_group_size=1000)
    documents = read(path, "parquet", "body")
    assert [document.data.decode() for document in documents] == [f"r{number}" for number in range(2500)]
    assert documents[-1].source == f"{path}, row 2500"
    assert "x.parquet: no column 'text'; found 'body', 'n'" in refused(path, "parquet")
    numbers = refused(path, "parquet", "n")
    assert "x.parquet: 2,500 rows: 'n' must be a string, got a number (rows 1, 2, 3, ...)." in numbers
    path.write_bytes(path.read_bytes()[:100])
    assert "x.parquet: cannot be read" in refused(path, "parquet", "body")
    path.write_bytes(b"")
    assert "x.parquet: cannot be read" in refused(path, "parquet", "body")


def test_saved_dataset(tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "rows"
    Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]}).with_format("torch").save_to_disk(str(path))
    assert [document.data for document in read(path, "dataset")] == [b"a", b"b"]
    assert "rows: no column 'body'; found 'text', 'n'" in refused(path, "dataset", "body")
    (path / "state.json").write_text(json.dumps({"broken": True}))
    assert "rows: cannot be read" in refused(path, "dataset")

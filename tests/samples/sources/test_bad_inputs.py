"""Bad input of every sort ends in words that name file and line, all at once."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import re
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image

from ds_trainer.samples.sources import compression, rows
from ds_trainer.samples.sources.files import find_files
from ds_trainer.samples.sources.record import BadLines
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError
from tests.samples.sources.bad_inputs import GOOD, LINES, answer

CASES = [(name, *case) for name, cases in LINES.items() for case in cases]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (4, 4)).save(tmp_path / "good.png")
    Image.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.png").write_bytes(b"")
    return tmp_path


def problems_of(path: Path, **spec: Any) -> list[str]:
    """All problems of a source, with the name of its file in place of the path."""
    bad = BadLines()
    list(Source(SourceSpec(path=(str(path),), **spec), "data.train").read(bad))
    with pytest.raises(ConfigError) as caught:
        bad.check()
    return [problem.replace(f"{path.parent}/", "") for problem in caught.value.problems]


def write(path: Path, name: str, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join([GOOD[name], *lines, GOOD[name]]) + b"\n")
    return path


@pytest.mark.cases(11, rest="extended")
@pytest.mark.parametrize(("name", "line", "reason"), CASES)
def test_a_bad_line_is_named(folder: Path, name: str, line: bytes, reason: str) -> None:
    problems = problems_of(write(folder / "x.jsonl", name, line))
    assert len(problems) == 1
    assert problems[0].startswith("x.jsonl:2: ")
    assert reason in problems[0]
    assert problems[0].endswith("or set data.bad_lines to skip, which counts them and leaves them out.")


@pytest.mark.parametrize("name", list(LINES))
def test_all_bad_lines_of_a_file_are_reported_together(folder: Path, name: str) -> None:
    cases = LINES[name]
    problems = problems_of(write(folder / "x.jsonl", name, *(line for line, _ in cases)))
    for number, (_, reason) in enumerate(cases, 2):
        assert [problem for problem in problems if reason in problem and f"x.jsonl:{number}: " in problem] or any(
            " lines: " in problem or " lines like line " in problem or "more problems follow" in problem
            for problem in problems
        )
    counted = [re.search(r"x.jsonl: (\d+) lines|^([\d,]+) more problems", problem) for problem in problems]
    assert sum(int(found[1] or found[2]) if found else 1 for found in counted) == len(cases)


def test_lines_with_one_mistake_are_one_sentence(folder: Path) -> None:
    turn = b'{"messages": [{"role": "user", "content": "a"}, {"role": "asystant", "content": "b"}]}'
    path = folder / "x.jsonl"
    path.write_bytes(b"\n".join([turn] * 2000) + b"\n")
    (problem,) = problems_of(path)
    assert problem.startswith("x.jsonl: 2,000 lines: turn 2 of 'messages' has the role 'asystant'; ")
    assert " (lines 1, 2, 3, ...). Did you mean 'assistant'?" in problem


@pytest.mark.parametrize("name", list(LINES))
def test_bad_lines_are_skipped_and_counted_when_asked_for(folder: Path, name: str) -> None:
    path = write(folder / "x.jsonl", name, *(line for line, _ in LINES[name]))
    bad = BadLines("skip")
    source = Source(SourceSpec(path=(str(path),)), "data.train")
    records = list(source.read(bad))
    bad.check()
    assert bad.count == len(LINES[name])
    assert [record.source for record in records] == [f"{path}:1", f"{path}:{len(LINES[name]) + 2}"]
    assert records[0].fields == records[1].fields


def test_there_are_at_least_two_hundred() -> None:
    assert len(CASES) >= 200


TABLES = [
    ("x.csv", b"prompt,completion\na,b\nc\n", "x.csv:3: has 1 value, but the first line names 2 columns"),
    ("x.csv", b"prompt,completion\na,b,c\n", "x.csv:2: has 3 values, but the first line names 2 columns"),
    ("x.csv", b'prompt,completion\n"a\nb",c\nd,\xff\n', "x.csv:4: not UTF-8 text"),
    ("x.csv", b'prompt,completion\na,"b"c\n', "x.csv:2: not valid CSV: ',' expected after '\"'"),
    ("x.csv", b'prompt,completion\na,"b\nc,d\n', "x.csv:2: not valid CSV: unexpected end of data"),
    ("x.csv", b"prompt,completion\na,\n", "x.csv:2: 'completion' is empty"),
    ("x.csv", b"prompt,completion\n,b\n", "x.csv:2: 'prompt' is empty"),
    ("x.csv", b"prompt,prompt\na,b\n", "x.csv:1: the column 'prompt' appears twice in the first line"),
    ("x.csv", b"prompt,\na,b\n", "x.csv:1: a column in the first line has no name"),
    ("x.csv", b"messages\n[{}]\n", "x.csv:2: turn 1 of 'messages' has no 'role'"),
    ("x.csv", b"messages\nhello\n", "x.csv:2: 'messages' is a text, and not valid JSON"),
    ("x.csv", b"a,b\n1,2\n", "x.csv:2: no known format; its keys are 'a', 'b'. Known: messages; conversations"),
    ("x.tsv", b"prompt\tcompletion\na\n", "x.tsv:2: has 1 value, but the first line names 2 columns"),
    ("x.tsv", b"prompt\tcompletion\na\t \n", "x.tsv:2: 'completion' is empty"),
    ("x.json", b'[{"text": "a"},\n5]', "x.json:2: expected a mapping with 'text', got a number"),
    ("x.json", b'[{"text": "a"},\n\n{"text": null}]', "x.json:3: 'text' is null"),
    ("x.json", b'[{"text": "a"},\n{"text": "b"', "x.json:2: not valid JSON"),
    ("x.json", b'[{"text": "a"}\n{"text": "b"}]', "x.json:2: not valid JSON: expected ',' or ']' after an element"),
    ("x.json", b'[{"text": "a"},\n{"text": "b", "text": "c"}]', "x.json:2: the key 'text' appears twice"),
    ("x.json", b'[{"text": "a"},\n{"text": "\xff"}]', "x.json:2: not UTF-8 text (byte 27 of the file)"),
    ("x.json", b'{"data": [{"text": "a"}, {"text": 5}]}', "x.json, row 2: 'text' must be a string, got a number"),
    ("x.json", b'{"text": "a"}\n{"text": 5}\n', "x.json:2: 'text' must be a string, got a number"),
    ("x.json", b'{"a": 1}', "x.json:1: no known format; its keys are 'a'"),
    ("x.json", "[]".encode("utf-16"), "x.json: is UTF-16; convert it to UTF-8"),
    ("x.json", b"hello", "x.json:1: not valid JSON: Expecting value (column 1)"),
    ("x.jsonl", '{"text": "a"}'.encode("utf-16"), "x.jsonl: is UTF-16; convert it to UTF-8"),
    ("x.jsonl", '{"text": "a"}'.encode("utf-32"), "x.jsonl: is UTF-32; convert it to UTF-8"),
    ("x.jsonl", b'[\n{"text": "a"}\n]', "x.jsonl:1: a JSON value over several lines; name the file .json"),
    ("x.jsonl", b'{\n"text": "a"\n}', "x.jsonl:1: a JSON value over several lines; name the file .json"),
    ("x.jsonl", b'{"a": 1}\n', "x.jsonl:1: no known format; its keys are 'a'"),
    ("x.jsonl", b'{"a": 1}\n' * 2, "or set text_key. Correct them, or set data.bad_lines"),
    ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "x.jsonl.gz: cannot be read: EOFError"),
    ("x.jsonl.gz", b"text", "x.jsonl.gz: cannot be read: BadGzipFile"),
    ("x.jsonl.xz", b"text", "x.jsonl.xz: cannot be read: LZMAError"),
    ("x.jsonl.bz2", b"text", "x.jsonl.bz2: cannot be read: OSError"),
    ("x.txt", b"caf\xe9", "x.txt: 'text' cannot be encoded as UTF-8"),
    ("x.txt", b"", "x.txt: 'text' is empty"),
    ("x.parquet", b"", "x.parquet: cannot be read: ArrowInvalid"),
    ("x.parquet", b"PAR1 nothing PAR1", "x.parquet: cannot be read"),
    ("x.arrow", b"nothing", "x.arrow: cannot be read: ArrowInvalid"),
]


@pytest.mark.cases(11, rest="extended")
@pytest.mark.parametrize(("name", "content", "problem"), TABLES)
def test_other_files(folder: Path, name: str, content: bytes, problem: str) -> None:
    (folder / name).write_bytes(content)
    assert problem in problems_of(folder / name)[0]


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": partial(pyarrow.compress, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("before", [b"", b'{"text": "a"}\n'], ids=["zeros", "cut"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.bin", "x.parquet", "x.arrow", "dataset"])
def test_a_large_file_without_content_is_not_read(tmp_path: Path, name: str, before: bytes) -> None:
    """A name in a full disk or a broken copy: none of its 60 GB is digested or held."""
    if name == "dataset":
        pytest.importorskip("datasets").Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / name))
    with (next((tmp_path / name).glob("*.arrow")) if name == "dataset" else tmp_path / name).open("wb") as stream:
        stream.write(before)
        stream.truncate(60 * 10**9)
    start = "ends with NUL bytes, from byte 59,999,995,904" if before else "begins with NUL bytes, from byte 0"
    expected = f"{start} on: it was not written completely"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Source(SourceSpec(path=(str(tmp_path / name),)), "data.eval")


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt"])
def test_a_hole_in_the_middle_is_said(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as stream:
        stream.write(b'{"text": "a"}\n' * 2**16)
        stream.seek(60 * 10**9)
        stream.write(b'{"text": "a"}\n' * 2**16)
    with pytest.raises(
        ConfigError, match="goes on with NUL bytes, from byte 917,504 on: it was not written completely"
    ):
        Source(SourceSpec(path=(str(tmp_path / name),)), "data.eval")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_a_file_may_be_larger_than_memory(
    tmp_path: Path, name: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample is read for itself; limits are those of one sample."""
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 2**20)
    monkeypatch.setattr(compression, "MAX_WHOLE_BYTES", 2**20)
    texts = [random.Random(number).randbytes(5_000).hex() for number in range(600)]
    written = {
        "x.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "x.json": json.dumps([{"text": text} for text in texts], indent=[None, 1][len(suffix) % 2]),
        "x.csv": "text\n" + "\n".join(texts),
    }[name].encode()
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESS[suffix[1:]](written) if suffix else written)
    del written
    tracemalloc.start()
    found = [row.value["text"] for row in rows.read_rows(find_files(SourceSpec(path=(str(path),)), "data")[0])]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == texts and peak < 6e6 + 5 * 2**20


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_nothing_but_spaces_ends_early(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 2**20)
    monkeypatch.setattr(rows, "MAX_BLANK_LINES", 2**12)
    for number, space in enumerate((b"\n", b" ", b" \n", b" " * 2**18 + b"\n")):
        path = tmp_path / f"{number}{name}"
        path.write_bytes(b'[{"text": "a"},' + space * (5 * 2**20 // len(space)) + b'{"text": "a"}]')
        began = time.process_time()
        assert len(problems_of(path)) >= 1 and time.process_time() - began < 3.0


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("filler", [b"\0", b"\n"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt"])
def test_a_compressed_file_that_grows_is_refused(
    tmp_path: Path, name: str, filler: bytes, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 2**20)
    monkeypatch.setattr(compression, "FREE_GROWTH", 2**20)
    monkeypatch.setattr(rows, "MAX_BLANK_LINES", 2**12)
    path = tmp_path / f"{name}.{suffix}"
    path.write_bytes(COMPRESS[suffix](filler * 2**20) * 50)
    tracemalloc.start()
    (problem,) = problems_of(path)
    assert tracemalloc.get_traced_memory()[1] < 24 * 2**20
    tracemalloc.stop()
    reasons = (
        "it becomes more than 250 times as large as it is",
        "the line is longer",
        "blank lines",
        "a run of spaces",
    )
    assert any(reason in problem for reason in reasons)


def test_tables_with_bad_rows(folder: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.table(
        {
            "prompt": ["a", None, "b", ""],
            "completion": pyarrow.StringArray.from_buffers(4, *_strings([b"x", b"y", b"\xff", b"z"])),
        }
    )
    pyarrow.parquet.write_table(table, folder / "x.parquet")
    with pyarrow.ipc.new_file(folder / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        problems = problems_of(folder / name)
        assert problems[0] == f"{name}, row 2: 'prompt' is null."
        assert len(problems) == 3
        assert problems[1] == f"{name}, row 3: not UTF-8 text."
        assert problems[2].startswith(f"{name}, row 4: 'prompt' is empty.")


def _strings(values: list[bytes]) -> tuple[Any, Any]:
    import numpy as np
    import pyarrow

    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pyarrow.py_buffer(offsets.tobytes()), pyarrow.py_buffer(b"".join(values))


def test_a_gigantic_line_is_passed_over_without_being_held(folder: Path) -> None:
    path = folder / "x.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(GOOD["text"] + b'\n{"text": "')
        for _ in range(rows.MAX_LINE_BYTES // 2**20 + 3):
            file.write(b"a" * 2**20)
        file.write(b'"}\n{"text": 5}\n' + GOOD["text"])
    problems = problems_of(path)
    assert problems[0] == "x.jsonl.gz:2: the line is longer than 64 MiB."
    assert problems[1].startswith("x.jsonl.gz:3: 'text' must be a string")


def test_several_files_and_formats_are_reported_together(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD["messages"] + b"\n" + GOOD["text"] + b"\n5\n")
    (folder / "b.jsonl").write_bytes(GOOD["alpaca"] + b"\n" + answer(images=["missing.png"]))
    bad = BadLines()
    list(Source(SourceSpec(path=(f"{folder}/*.jsonl",)), "data.train").read(bad))
    places = [problem.split(": ")[0].rsplit("/")[-1] for problem in bad.problems()]
    assert places == ["a.jsonl:2", "a.jsonl:3", "b.jsonl:1", "b.jsonl:2"]
    assert "The samples of a source have one format, here conversations (messages)" in bad.problems()[0]


def test_two_kinds_in_one_row_have_to_be_chosen(folder: Path) -> None:
    row = {**json.loads(GOOD["messages"]), **json.loads(GOOD["preference"])}
    (folder / "x.jsonl").write_text(json.dumps(row))
    assert "set kind of the source to messages or preference" in problems_of(folder / "x.jsonl")[0]
    for kind in ("messages", "preference"):
        source = Source(SourceSpec(path=(str(folder / "x.jsonl"),), kind=kind), "x")
        assert [record.kind for record in source.read(BadLines())] == [kind]

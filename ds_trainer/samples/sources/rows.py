"""Rows as they are in a file, one reader for each format; what cannot be read is yielded as a :class:`BadLine`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ds_trainer.samples.sources import compression
from ds_trainer.samples.sources.compression import READ_ERRORS, open_bytes, read_whole, reason_of
from ds_trainer.samples.sources.files import SourceFile
from ds_trainer.samples.sources.json_text import DECODER, JsonText, NotText, RepeatedKey
from ds_trainer.samples.sources.record import BadLine
from ds_trainer.samples.sources.tables import read_arrow, read_dataset, read_parquet
from ds_trainer.utils.units import counted

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is a bad line: it is passed over without being held in memory, up to four times as many bytes."""

MAX_BLANK_LINES = 2**20

_BOM = b"\xef\xbb\xbf"
_OTHER_ENCODINGS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class SourceRow(NamedTuple):
    """A row: where it is (``file:line`` or ``file, row N``) and its value.

    The value of a text file is its content as bytes, that of all others what the format says, usually a dict.
    """

    where: str
    value: Any


def read_rows(file: SourceFile, columns: Sequence[str] | None = None) -> Iterator[SourceRow | BadLine]:
    """The rows of ``file`` in order, and its bad lines.

    Args:
        file: what to read.
        columns: the only ones that are read of a table; one that is missing makes the whole file bad.
    """
    if file.format in _TABLES:
        read = _TABLES[file.format](file.path, columns)
        for number, value in enumerate(read, 1):
            yield value if isinstance(value, BadLine) else SourceRow(f"{file.path}, row {number}", value)
        return
    try:
        yield from _READERS[file.format](file.path)
    except READ_ERRORS as error:
        yield BadLine(str(file.path), reason_of(error), whole_file=True)


def read_text(path: Path) -> Iterator[SourceRow | BadLine]:
    """The whole file as one row of bytes."""
    yield SourceRow(str(path), read_whole(path))


def read_jsonl(path: Path) -> Iterator[SourceRow | BadLine]:
    """One JSON value per line; blank lines are passed over."""
    with open_bytes(path) as stream:
        number = blank = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if number == 1:
                if (bad := _first_line_problem(path, line)) is not None:
                    yield bad
                    return
                line = line.removeprefix(_BOM)
            if len(line) > MAX_LINE_BYTES:
                parts = 1
                while line and not line.endswith(b"\n"):
                    if parts == 4:
                        yield _long_line(where, parts)
                        return
                    line = stream.readline(MAX_LINE_BYTES)
                    parts += 1
                yield _long_line(where)
            elif line.strip():
                blank = 0
                yield _parsed(where, line)
            elif (blank := blank + 1) > MAX_BLANK_LINES:
                yield BadLine(where, f"{MAX_BLANK_LINES:,} blank lines follow each other; remove them", whole_file=True)
                return


def read_json(path: Path) -> Iterator[SourceRow | BadLine]:
    """A list of samples, an object with one list of samples, or one JSON object per line."""
    with open_bytes(path) as stream:
        start = stream.read(4)
        if (encoding := _other_encoding(start)) is not None:
            yield BadLine(str(path), f"is {encoding}; convert it to UTF-8", whole_file=True)
            return
    if _has_objects_in_lines(path):
        yield from read_jsonl(path)
        return
    with open_bytes(path) as stream:
        if start.startswith(_BOM):
            stream.read(len(_BOM))
        yield from _elements(path, JsonText(stream))


def _has_objects_in_lines(path: Path) -> bool:
    """Whether the first line is an object, and something follows it."""
    first = b""
    with open_bytes(path) as stream:
        for line in islice(iter(partial(stream.readline, MAX_LINE_BYTES), b""), MAX_BLANK_LINES):
            if first and line.strip():
                return isinstance(getattr(_parsed("", first), "value", None), dict)
            first = first or line.removeprefix(_BOM).strip()
            if first and (first[:1] != b"{" or not line.endswith(b"\n")):
                return False
            if len(line) == MAX_LINE_BYTES:
                return False
    return False


def read_csv(path: Path, delimiter: str = ",") -> Iterator[SourceRow | BadLine]:
    """One row per line, named by the first line; values with line breaks are quoted.

    Python's reader, because it knows the line of what it cannot read.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    with open_bytes(path) as stream:
        encoding = _other_encoding(stream.read(4))
        if encoding is not None:
            yield BadLine(str(path), f"is {encoding}; convert it to UTF-8", whole_file=True)
            return
    with open_bytes(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(_bounded_lines(text), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        blank = 0
        while True:
            where = f"{path}:{reader.line_num + 1}"
            try:
                row = next(reader)
            except StopIteration:
                return
            except OverflowError:
                yield _long_line(where, 1)
                return
            except csv.Error as error:
                yield BadLine(where, f"not valid CSV: {error}")
                continue
            if not row and (blank := blank + 1) > MAX_BLANK_LINES:
                yield BadLine(where, f"{MAX_BLANK_LINES:,} blank lines follow each other; remove them", whole_file=True)
                return
            if not row:
                continue
            blank = 0
            if header is None:
                header = row
                if problem := _header_problem(header):
                    yield BadLine(where, problem, whole_file=True)
                    return
                continue
            yield _named(where, header, row)


_READERS: dict[str, Callable[[Path], Iterator[SourceRow | BadLine]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "tsv": partial(read_csv, delimiter="\t"),
}
_TABLES = {"parquet": read_parquet, "arrow": read_arrow, "dataset": read_dataset}


# -- JSON --------------------------------------------------------------------------------------------------------------


def _parsed(where: str, line: bytes) -> SourceRow | BadLine:
    try:
        return SourceRow(where, DECODER.decode(line.decode("utf-8")))
    except ValueError as error:
        return BadLine(where, _json_reason(error))
    except RecursionError:
        return BadLine(where, "not valid JSON: nested too deeply")


def _json_reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start + 1} of the line)"
    if isinstance(error, NotText):
        return str(error)
    if isinstance(error, RepeatedKey):
        return f"the key {str(error)!r} appears twice in an object"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} (column {error.colno}); each line must be one JSON object"
    return f"not valid JSON: {error}"


def _long_line(where: str, parts: int = 0) -> BadLine:
    limit = max(parts, 1) * MAX_LINE_BYTES // 2**20
    lost = "; each sample must end with a line break" if parts else ""
    return BadLine(where, f"the line is longer than {limit} MiB{lost}", whole_file=parts > 0)


def _first_line_problem(path: Path, line: bytes) -> BadLine | None:
    if (encoding := _other_encoding(line)) is not None:
        return BadLine(str(path), f"is {encoding}; convert it to UTF-8", whole_file=True)
    if line.removeprefix(_BOM).strip() in (b"[", b"{"):
        return BadLine(f"{path}:1", "a JSON value over several lines; name the file .json, or set format to json", True)
    return None


def _other_encoding(start: bytes) -> str | None:
    return next((name for mark, name in _OTHER_ENCODINGS if start.startswith(mark)), None)


def _elements(path: Path, text: JsonText) -> Iterator[SourceRow | BadLine]:
    """The elements of a JSON list with their lines, or the rows of an object."""
    first = "["
    try:
        if not (first := text.peek(MAX_LINE_BYTES)):
            return
        if first != "[":
            where, value = f"{path}:{text.line}", text.value(compression.MAX_WHOLE_BYTES)
            yield from _second_value(path, text) or _rows_of_object(path, where, value)
            return
        text.skip()
        while text.peek(MAX_LINE_BYTES) != "]":
            where = f"{path}:{text.line}"
            yield SourceRow(where, text.value(MAX_LINE_BYTES))
            if text.peek(MAX_LINE_BYTES) not in (",", "]"):
                reason = "not valid JSON: expected ',' or ']' after an element"
                yield BadLine(f"{path}:{text.line}", reason, whole_file=True)
                return
            if text.peek(0) == ",":
                text.skip()
        text.skip()
        yield from _second_value(path, text)
    except OverflowError as error:
        most = MAX_LINE_BYTES if first == "[" else compression.MAX_WHOLE_BYTES
        reason = f"{error} is larger than {most // 2**20:,} MiB; write one sample per line (jsonl)"
        yield BadLine(f"{path}:{text.line}", reason, whole_file=True)
    except RecursionError:
        yield BadLine(f"{path}:{text.line}", "not valid JSON: nested too deeply", whole_file=True)
    except ValueError as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else text.line
        yield BadLine(f"{path}:{line}", _json_reason(error).partition("; each line")[0], whole_file=True)


def _second_value(path: Path, text: JsonText) -> list[BadLine]:
    """Something after the only value of a file: files that were joined, or objects that were printed one by one."""
    if not text.peek(MAX_LINE_BYTES):
        return []
    reason = "not valid JSON: a second value follows the first; write one object per line (jsonl), or one list"
    return [BadLine(f"{path}:{text.line}", reason, whole_file=True)]


def _rows_of_object(path: Path, where: str, value: Any) -> Iterator[SourceRow | BadLine]:
    lists = []
    if isinstance(value, dict):
        lists = [key for key, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    turns = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected", "tools")
    samples = [key for key in lists if key not in turns]
    if len(samples) != 1 or len(samples) < len(lists):
        yield SourceRow(where, value)
        return
    for number, row in enumerate(value[samples[0]], 1):
        yield SourceRow(f"{path}, row {number}", row)


# -- CSV ---------------------------------------------------------------------------------------------------------------


def _bounded_lines(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise OverflowError
        yield line


def _header_problem(header: list[str]) -> str | None:
    if not _is_text(header):
        return "not UTF-8 text"
    if not all(name.strip() for name in header):
        return "a column in the first line has no name"
    repeated = sorted({name for name in header if header.count(name) > 1})
    return f"the column {repeated[0]!r} appears twice in the first line" if repeated else None


def _named(where: str, header: list[str], row: list[str]) -> SourceRow | BadLine:
    if len(row) != len(header):
        return BadLine(
            where, f"has {counted(len(row), 'value')}, but the first line names {counted(len(header), 'column')}"
        )
    if not _is_text(row):
        return BadLine(where, "not UTF-8 text")
    return SourceRow(where, dict(zip(header, row, strict=True)))


def _is_text(row: list[str]) -> bool:
    """Whether no byte had to become a surrogate."""
    try:
        "".join(row).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

"""``Source``: the samples of one entry of a recipe's data, read and checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ds_trainer.samples.sources.files import SourceFile, find_files
from ds_trainer.samples.sources.formats import RecordFormat, recognize, text_format
from ds_trainer.samples.sources.record import BadLine, BadLines, BadRecord, Record
from ds_trainer.samples.sources.rows import SourceRow, read_rows
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

_BOM = b"\xef\xbb\xbf"


class Source:
    """The records of a source, in an order that depends on its files only.

    Args:
        spec: what is wanted.
        key: its name in messages, such as ``data.train[0]``.
        without: files that are left out, those of evaluation data.

    Attributes:
        files: where the samples are.
        format: how samples are recognized; known once the first valid one was read, see :meth:`find_format`.
        count: number of records of the last complete reading; None before.

    Raises:
        ConfigError: a path matches nothing; lists all problems.
    """

    def __init__(self, spec: SourceSpec, key: str, without: Collection[Path] = ()) -> None:
        self.spec, self.key = spec, key
        files = find_files(spec, key)
        if unusual := [problem for file in files if (problem := _name_problem(key, file.path))]:
            raise ConfigError(unusual)
        others = {path.resolve() for path in without}
        self.files = [file for file in files if file.path.resolve() not in others]
        if not self.files:
            raise ConfigError(
                f"{key}: no training data: {counted(len(files), 'file is', 'files are')} also in data.eval."
            )
        self.format: RecordFormat | None = None
        self.count: int | None = None
        self._sought = False

    @property
    def name(self) -> str:
        """The name in figures and logs: that of the spec, or of its first file or directory."""
        return self.spec.name or Path(self.spec.path[0]).name or self.spec.path[0]

    def paths(self) -> Iterator[Path]:
        """The files whose content decides the records; of a directory that is one dataset, all files in it."""
        for file in self.files:
            inside = sorted(file.path.rglob("*")) if file.path.is_dir() else [file.path]
            yield from (path for path in inside if path.is_file())

    def find_format(self) -> RecordFormat | None:
        """The format of the samples, from the first row that has one; None if no row has."""
        if not self._sought:
            self._sought = True
            if self.spec.text_key is not None:
                self.format = text_format(self.spec.text_key)
            else:
                rows = (row for file in self.files for row in read_rows(file) if isinstance(row, SourceRow))
                formats = (recognize(_value(row, "text"), self.spec.kind) for row in rows)
                self.format = next((entry for entry in formats if isinstance(entry, RecordFormat)), None)
        return self.format

    def read(self, bad: BadLines) -> Iterator[Record]:
        """The records, up to the limit of the source. Bad lines are added to ``bad``, and what follows them is read."""
        count = 0
        for record in islice(self._all(bad), self.spec.limit):
            count += 1
            yield record
        self.count = count

    def _all(self, bad: BadLines) -> Iterator[Record]:
        for file in self.files:
            for record in read_file(file, self.find_format(), self.spec.kind):
                if isinstance(record, BadLine):
                    bad.add(record)
                else:
                    yield record

    @property
    def format_name(self) -> str:
        """The name of the format of the samples."""
        format = self.find_format()
        return "an unknown format" if format is None else format.name

    def describe(self) -> str:
        """One line for the log: what was found."""
        files = f"{len(self.files):,} file{'s' if len(self.files) > 1 else ''}"
        count = "records" if self.count is None else f"{self.count:,} record{'s' if self.count != 1 else ''}"
        limited = f", limit {self.spec.limit:,}" if self.count is not None and self.count == self.spec.limit else ""
        return f"{self.key} ({self.name}): {count} of {self.format_name} in {files}{limited}"


def read_file(file: SourceFile, format: RecordFormat | None, kind: str = "auto") -> Iterator[Record | BadLine]:
    """The records of one file, and its bad lines.

    Args:
        file: what to read.
        format: how its samples are recognized; None: no row has a known format, so each is a bad line.
        kind: what the recipe says about the samples.
    """
    text_key = format.keys[0] if format is not None and format.kind == "text" else "text"
    for row in read_rows(file):
        if isinstance(row, BadLine):
            yield row
            continue
        value = _value(row, text_key)
        try:
            if format is None:
                raise BadRecord(str(recognize(value, kind)))
            yield format.record(row.where, value, file.path.parent, kind != "auto")
        except BadRecord as error:
            yield BadLine(row.where, str(error))


def _name_problem(key: str, path: Path) -> str | None:
    """Names of files are in figures, logs and cards, which are UTF-8."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        shown = str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return f"{key}: the name of the file {shown} is not UTF-8; rename it."
    return None


def _value(row: SourceRow, text_key: str) -> Any:
    """The value of a row; a text file is a row with one key. Bytes that are not UTF-8 become surrogates: a bad line."""
    if not isinstance(row.value, bytes):
        return row.value
    return {text_key: row.value.removeprefix(_BOM).decode("utf-8", errors="surrogateescape")}

"""Tables: Parquet and Arrow files, and directories that ``datasets`` wrote. Yields dicts, one for each row."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_trainer.samples.sources.compression import reason_of
from ds_trainer.samples.sources.record import BadLine
from ds_trainer.utils.errors import ConfigError, did_you_mean

_ROWS_TOGETHER = 1000


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any] | BadLine]:
    """The rows of a Parquet file."""
    pyarrow = _library("pyarrow", "Parquet files")
    parquet = _library("pyarrow.parquet", "Parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            if (bad := _missing(path, columns, file.schema_arrow.names)) is not None:
                yield bad
                return
            yield from _rows(path, file.iter_batches(batch_size=_ROWS_TOGETHER, columns=columns))
    except (OSError, pyarrow.ArrowException) as error:
        yield BadLine(str(path), reason_of(error), whole_file=True)


def read_arrow(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any] | BadLine]:
    """The rows of an Arrow file, in the file format or (as ``datasets`` writes it) the stream format."""
    pyarrow = _library("pyarrow", "Arrow files")
    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_file(source)
                batches: Iterable[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                source.seek(0)
                batches = reader = pyarrow.ipc.open_stream(source)
            if (bad := _missing(path, columns, reader.schema.names)) is not None:
                yield bad
                return
            chosen = (batch if columns is None else batch.select(list(columns)) for batch in batches)
            yield from _rows(path, (part for batch in chosen for part in _parts(batch)))
    except (OSError, pyarrow.ArrowException) as error:
        yield BadLine(str(path), reason_of(error), whole_file=True)


def read_dataset(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any] | BadLine]:
    """The rows of a ``datasets.Dataset`` that ``save_to_disk`` wrote to the directory ``path``."""
    datasets = _library("datasets", "saved datasets")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever the library raises, the remedy is to save the dataset again
        yield BadLine(str(path), reason_of(error), whole_file=True)
        return
    if (bad := _missing(path, columns, dataset.column_names)) is not None:
        yield bad
        return
    chosen = dataset if columns is None else dataset.select_columns(list(columns))
    yield from _rows(path, chosen.with_format("arrow").iter(batch_size=_ROWS_TOGETHER))


def _parts(batch: Any) -> Iterator[Any]:
    for start in range(0, batch.num_rows, _ROWS_TOGETHER):
        yield batch.slice(start, _ROWS_TOGETHER)


def _rows(path: Path, batches: Iterable[Any]) -> Iterator[dict[str, Any] | BadLine]:
    done = 0
    for batch in batches:
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:  # some row of it is not UTF-8
            for index in range(batch.num_rows):
                try:
                    yield from batch.slice(index, 1).to_pylist()
                except UnicodeDecodeError:
                    yield BadLine(f"{path}, row {done + index + 1}", "not UTF-8 text")
        done += batch.num_rows


def _missing(path: Path, columns: Sequence[str] | None, there: Sequence[str]) -> BadLine | None:
    for name in columns or ():
        if name not in there:
            return BadLine(str(path), no_key("column", name, there), whole_file=True)
    return None


def no_key(what: str, text_key: str, there: Sequence[str]) -> str:
    """``no column 'text'; found ...`` for messages."""
    listed = ", ".join(repr(name) for name in there[:20]) or "none"
    hint = did_you_mean(text_key, there)
    return f"no {what} {text_key!r}; found {listed}. Set text_key to the one with the text.{hint}".rstrip(".")


def _library(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "pip install 'ds-trainer[hf]'"
        raise ConfigError(f"Reading {purpose} needs {module.partition('.')[0]}; install it with {remedy}.") from error

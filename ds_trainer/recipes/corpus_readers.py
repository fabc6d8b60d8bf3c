"""Readers of the file formats. Each yields the documents of one file; ConfigError names the location of bad data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ds_trainer.utils.errors import ConfigError, did_you_mean


class Document(NamedTuple):
    """A text as UTF-8 bytes (of a text file: its unchanged bytes) and its source: ``file`` or ``file:line``."""

    source: str
    data: bytes


def read_text(path: Path, text_key: str) -> Iterator[Document]:
    """The whole file (``.gz``: decompressed) as one document."""
    try:
        with _open(path) as stream:
            yield Document(str(path), stream.read())
    except (OSError, EOFError) as error:
        raise _unreadable(path, error) from error


def read_jsonl(path: Path, text_key: str) -> Iterator[Document]:
    """One JSON object per line with the text under ``text_key``; blank lines are skipped."""
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _json_document(f"{path}:{number}", line, text_key)
    except (OSError, EOFError) as error:
        raise _unreadable(path, error) from error


def _json_document(source: str, line: bytes, text_key: str) -> Document:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not valid JSON: {error}; each line must be one JSON object.") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{source}: expected a JSON object with the key {text_key!r}, got {type(record).__name__}.")
    if text_key not in record:
        raise ConfigError(f"{source}: {_no_key('key', text_key, list(record))}")
    return _text_document(source, record[text_key], text_key)


def read_parquet(path: Path, text_key: str) -> Iterator[Document]:
    """One document per row, from the column ``text_key``."""
    pyarrow = _import("pyarrow", "parquet files")
    parquet = _import("pyarrow.parquet", "parquet files")
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                raise ConfigError(f"{path}: {_no_key('column', text_key, columns)}")
            for batch in file.iter_batches(columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _text_document(f"{path}: row {row}", value, text_key)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def read_dataset(path: Path, text_key: str) -> Iterator[Document]:
    """One document per row of a ``datasets.Dataset`` that ``save_to_disk`` wrote to the directory ``path``."""
    datasets = _import("datasets", "saved datasets")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever the library raises, the remedy is to save the dataset again
        raise _unreadable(path, error) from error
    if text_key not in dataset.column_names:
        raise ConfigError(f"{path}: {_no_key('column', text_key, dataset.column_names)}")
    row = 0
    for batch in dataset.with_format(None).select_columns([text_key]).iter(batch_size=1000):
        for value in batch[text_key]:
            row += 1
            yield _text_document(f"{path}: row {row}", value, text_key)


READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "dataset": read_dataset,
}


def _text_document(source: str, value: Any, text_key: str) -> Document:
    if isinstance(value, bytes):
        return Document(source, value)
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise ConfigError(f"{source}: {text_key!r} must be a string, got {kind}.")
    try:
        return Document(source, value.encode("utf-8"))
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON, but half of a surrogate pair
        raise ConfigError(f"{source}: {text_key!r} cannot be encoded as UTF-8: {error.reason}.") from error


def _no_key(what: str, text_key: str, found: list[str]) -> str:
    listed = ", ".join(repr(name) for name in found[:20]) or "none"
    hint = did_you_mean(text_key, found)
    return f"no {what} {text_key!r}; found {listed}. Set data.text_key to the one with the text.{hint}"


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return ConfigError(f"{path} cannot be read: {reason}.")


def _import(module: str, purpose: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "pip install 'ds-trainer[hf]'"
        raise ConfigError(f"Reading {purpose} needs {module.partition('.')[0]}; install it with {remedy}.") from error

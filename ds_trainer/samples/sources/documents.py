"""Documents: the text of a file or a row as bytes, for corpora. Text files need not be UTF-8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ds_trainer.samples.sources.files import SourceFile
from ds_trainer.samples.sources.images import type_name
from ds_trainer.samples.sources.record import BadLine, BadLines
from ds_trainer.samples.sources.rows import SourceRow, read_rows
from ds_trainer.samples.sources.tables import no_key


class Document(NamedTuple):
    """A text as UTF-8 bytes (of a text file: its unchanged bytes) and its source: ``file``, or as in a record."""

    source: str
    data: bytes


def read_documents(file: SourceFile, text_key: str, bad: BadLines) -> Iterator[Document | None]:
    """The documents of ``file``: the whole of a text file, or what each row has under ``text_key``.

    A bad line is added to ``bad``, and None takes its place.
    """
    for row in read_rows(file, columns=(text_key,)):
        document = row if isinstance(row, BadLine) else _document(row, text_key)
        if isinstance(document, BadLine):
            bad.add(document)
        yield document if isinstance(document, Document) else None


def _document(row: SourceRow, text_key: str) -> Document | BadLine:
    where, value = row
    if isinstance(value, bytes):
        return Document(where, value)
    if not isinstance(value, Mapping):
        return BadLine(where, f"expected a JSON object with the key {text_key!r}, got {type_name(value)}")
    if text_key not in value:
        return BadLine(where, no_key("key", text_key, list(value)))
    return _text(where, value[text_key], text_key)


def _text(where: str, text: Any, text_key: str) -> Document | BadLine:
    if isinstance(text, bytes):
        return Document(where, text)
    if not isinstance(text, str):
        return BadLine(where, f"{text_key!r} must be a string, got {type_name(text)}")
    try:
        return Document(where, text.encode("utf-8"))
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON, but half of a surrogate pair
        return BadLine(where, f"{text_key!r} cannot be encoded as UTF-8: {error.reason}")

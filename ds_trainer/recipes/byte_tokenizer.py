"""A byte-level tokenizer: its vocabulary fits every text and needs no file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ds_trainer.samples.sources.documents import Document
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json, write_json


class ByteTokenizer:
    """Token ``b`` is the byte ``b``; token 256 separates documents."""

    FILE_NAME = "byte_tokenizer.json"

    vocab_size = 257
    separator_id = 256

    def encode(self, document: Document) -> np.ndarray:
        """Token ids of one document, uint8 of shape [bytes]. The bytes need not be valid text."""
        return np.frombuffer(document.data, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; separators become line breaks, invalid UTF-8 becomes U+FFFD."""
        return bytes(10 if token == self.separator_id else token for token in ids).decode("utf-8", errors="replace")

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write a small file to ``directory`` that marks the model there as byte-level."""
        content = {"tokenizer": "bytes", "vocab_size": self.vocab_size, "separator_id": self.separator_id}
        write_json(Path(directory) / self.FILE_NAME, content)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> ByteTokenizer:
        """The tokenizer that :meth:`save_pretrained` wrote to ``directory``.

        Raises:
            ConfigError: there is none, or its vocabulary differs.
        """
        path = Path(directory) / cls.FILE_NAME
        if not path.is_file():
            raise ConfigError(f"{str(directory)!r} has no {cls.FILE_NAME}: the model there is not byte-level.")
        tokenizer, content = cls(), read_json(path)
        for name in ("vocab_size", "separator_id"):
            if content.get(name) != getattr(tokenizer, name):
                raise ConfigError(f"{path}: {name} is {content.get(name)!r}, expected {getattr(tokenizer, name)}.")
        return tokenizer

"""Tokenizers of recipes: of bytes, and of transformers; processors, which make inputs of images as well."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ds_trainer.recipes.recipe import Recipe
from ds_trainer.samples.sources.documents import Document
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import directory_problem, read_json, unusual_file, write_json


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


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all ids are below it."""

    @property
    def separator_id(self) -> int:
        """The token before each document."""

    def encode(self, document: Document) -> np.ndarray:
        """Token ids of one document without special tokens, unsigned integers of shape [tokens]."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the tokenizer to ``directory``."""


class PretrainedTokenizer:
    """A Hugging Face tokenizer from a local directory.

    Raises:
        ConfigError: the directory does not exist or has no tokenizer, or the tokenizer has no token that can separate
            documents.
    """

    def __init__(self, directory: str, key: str = "data.tokenizer") -> None:
        if (problem := directory_problem(directory)) or not Path(directory).is_dir():
            problem = problem or "does not exist"
            raise ConfigError(f"{key}: {directory!r} is neither 'bytes' nor a directory: it {problem}.")
        if (unusual := unusual_file(Path(directory), ("*.json", "*.txt", "*.model", "*.jinja"))) is not None:
            raise ConfigError(f"{key}: {unusual}")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError("data.tokenizer needs transformers: pip install 'ds-trainer[hf]'.") from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # code of any tokenizer, which reads the model's config.json, too
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{key}: {directory!r} has no tokenizer that can be loaded: {reason}") from error
        separator = self._tokenizer.eos_token_id
        separator = self._tokenizer.bos_token_id if separator is None else separator
        if separator is None:
            raise ConfigError(
                f"{key}: the tokenizer in {directory!r} has neither an end-of-text nor a beginning-of-text "
                "token to separate documents; set eos_token in its tokenizer_config.json."
            )
        self.separator_id: int = int(separator)
        self.vocab_size: int = max(len(self._tokenizer), self.separator_id + 1)

    @property
    def pretrained(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    def encode(self, document: Document) -> np.ndarray:
        """Token ids, uint32 of shape [tokens].

        Raises:
            ConfigError: the document is not UTF-8.
        """
        try:
            text = document.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{document.source}: not UTF-8 text (byte {error.start}). Convert or exclude it, or set data.tokenizer "
                "to bytes, which accepts any file."
            ) from error
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the tokenizer's files to ``directory``."""
        self._tokenizer.save_pretrained(directory)


def load_tokenizer(name: str, key: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer ``name`` of a recipe: ``bytes``, or a directory (with a Hugging Face or a saved byte tokenizer).

    Raises:
        ConfigError: it cannot be loaded.
    """
    if name == "bytes":
        return ByteTokenizer()
    directory = os.path.expanduser(name)
    if os.path.isfile(os.path.join(directory, ByteTokenizer.FILE_NAME)):
        return ByteTokenizer.load(directory)
    return PretrainedTokenizer(directory, key)


def processor_of(recipe: Recipe) -> Any:
    """The processor of ``model.path``.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    name = recipe.model.path
    if name is None:
        raise ConfigError(
            f"{recipe.where('model')}: model: task vision_language starts from a trained model; set model.path."
        )
    return load_processor(name, f"{recipe.where('model.path')}: model.path")


def load_processor(name: str, where: str) -> Any:
    """The processor of the model ``name``, a directory or Hub name; ``where`` is the place of it, for messages.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    from transformers import AutoProcessor

    from ds_trainer.training.loading.model_files import model_directory

    try:
        processor = AutoProcessor.from_pretrained(model_directory(name, weights=False), local_files_only=True)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except ImportError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: the processor in {name!r} needs a package that is missing: {reason}") from error
    except Exception as error:  # code of any processor
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{where}: {name!r} has no processor that can be loaded: {reason}") from error
    if not hasattr(processor, "image_processor"):
        raise ConfigError(
            f"{where}: {name!r} has a {type(processor).__name__} and no processor for images "
            "(preprocessor_config.json). For text alone use task sft."
        )
    return processor

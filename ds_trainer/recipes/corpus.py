"""``Corpus``: the documents of a recipe that trains on text in blocks, and the held-out ones.

It finds the files of a :class:`~ds_trainer.recipes.data_spec.DataSpec` and selects the held-out ones before it reads
any. The order of documents depends on the paths only: sources in the order of the recipe, files of a directory by
relative path. So every rank and every later run reads the same documents in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.samples.sources.bad_lines import BadLines
from ds_trainer.samples.sources.documents import Document, read_documents
from ds_trainer.samples.sources.files import DOCUMENT_SUFFIXES, SourceFile, find_files
from ds_trainer.utils.errors import ConfigError


class CorpusFile(NamedTuple):
    """A file, and the key of the text in its rows."""

    file: SourceFile
    text_key: str

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.file.path


class Corpus:
    """The documents for training and for evaluation.

    Attributes:
        bad_lines: those of the files that were read.

    Raises:
        ConfigError: a path matches nothing, or no training data is left; lists all problems.
    """

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.bad_lines = BadLines(spec.bad_lines)
        problems: list[str] = []
        self.eval_files = self._find_all("eval", problems)
        train_files = self._find_all("train", problems)
        held_out = {file.path.resolve() for file in self.eval_files}
        self.train_files = [file for file in train_files if file.path.resolve() not in held_out]
        if train_files and not self.train_files:
            problems.append(f"data.train: all {len(train_files)} files are also in data.eval; no training data.")
        if problems:
            raise ConfigError(problems)

    @property
    def has_eval(self) -> bool:
        """Whether there is evaluation data."""
        return bool(self.eval_files) or self.spec.held_out_every is not None

    def train_documents(self) -> Iterator[Document]:
        """Training documents, without held-out and empty ones.

        Raises:
            ConfigError: at the end, if there were bad lines that the recipe does not allow; lists them.
        """
        return self._documents(self.train_files, held_out=False if self.spec.held_out_every else None)

    def eval_documents(self) -> Iterator[Document]:
        """Evaluation documents, without empty ones.

        Raises:
            ConfigError: as :meth:`train_documents`.
        """
        if self.spec.held_out_every:
            return self._documents(self.train_files, held_out=True)
        return self._documents(self.eval_files, held_out=None)

    def _documents(self, files: list[CorpusFile], held_out: bool | None) -> Iterator[Document]:
        """The documents of ``files``: all, or with ``held_out`` only those on that side of the split."""
        every = self.spec.held_out_every or 1
        self.bad_lines = BadLines(self.spec.bad_lines)
        index = 0
        for file, text_key in files:
            if file.format == "text" and held_out is not None and (index % every == 0) is not held_out:
                index += 1  # one document: its side of the split is known before it is read
                continue
            for document in read_documents(file, text_key, self.bad_lines):
                wanted = held_out is None or (index % every == 0) is held_out
                index += 1
                if wanted and document is not None and document.data:
                    yield document
        self.bad_lines.check()

    def _find_all(self, split: Literal["train", "eval"], problems: list[str]) -> list[CorpusFile]:
        """The files of a split in order, each once."""
        found: dict[Path, CorpusFile] = {}
        for key, spec in self.spec.sources(split):
            try:
                for file in find_files(spec, key, DOCUMENT_SUFFIXES):
                    found.setdefault(file.path.resolve(), CorpusFile(file, spec.text_key or "text"))
            except ConfigError as error:
                problems += error.problems
        return list(found.values())

"""Text sources: files, directories, glob patterns, jsonl, parquet, saved ``datasets``, the standard library.

A :class:`Corpus` finds the files of a :class:`~ds_trainer.recipes.recipe.DataSpec` and selects the held-out ones before
it reads any. The order of documents depends on the paths only: sources in the order of the recipe, files of a directory
by relative path. So every rank and every later run reads the same documents in the same order.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ds_trainer.recipes.corpus_readers import READERS, Document
from ds_trainer.recipes.recipe import DataSpec
from ds_trainer.utils.errors import ConfigError

PYTHON_STDLIB = "python-stdlib"
_NEVER_INCLUDED = ("__pycache__", "site-packages", "dist-packages")
_PATTERNS = {"auto": "*", "text": "*", "jsonl": "*.jsonl*", "parquet": "*.parquet"}
_SUFFIXES = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class SourceFile:
    """A source of documents: a file, or a directory written by ``datasets``."""

    path: Path
    format: str


class Corpus:
    """The documents for training and for evaluation.

    Raises:
        ConfigError: a path matches nothing, or no training data is left; lists all problems.
    """

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        problems: list[str] = []
        self.eval_files = _find_all(spec, spec.eval, "data.eval", problems)
        train_files = _find_all(spec, spec.train, "data.train", problems)
        held_out = {file.path for file in self.eval_files}
        self.train_files = [file for file in train_files if file.path not in held_out]
        if train_files and not self.train_files:
            problems.append(f"data.train: all {len(train_files)} files are also in data.eval; no training data.")
        if problems:
            raise ConfigError(problems)

    @property
    def has_eval(self) -> bool:
        """Whether there is evaluation data."""
        return bool(self.eval_files) or self.spec.held_out_every is not None

    def train_documents(self) -> Iterator[Document]:
        """Training documents, without held-out and empty ones."""
        return self._documents(self.train_files, held_out=False if self.spec.held_out_every else None)

    def eval_documents(self) -> Iterator[Document]:
        """Evaluation documents, without empty ones."""
        if self.spec.held_out_every:
            return self._documents(self.train_files, held_out=True)
        return self._documents(self.eval_files, held_out=None)

    def _documents(self, files: list[SourceFile], held_out: bool | None) -> Iterator[Document]:
        """The documents of ``files``: all, or with ``held_out`` only those on that side of the split."""
        every = self.spec.held_out_every or 1
        index = 0
        for file in files:
            if file.format == "text":  # one document: its side of the split is known before it is read
                wanted = held_out is None or (index % every == 0) is held_out
                index += 1
                if not wanted:
                    continue
                yield from (document for document in READERS["text"](file.path, self.spec.text_key) if document.data)
                continue
            for document in READERS[file.format](file.path, self.spec.text_key):
                wanted = held_out is None or (index % every == 0) is held_out
                index += 1
                if wanted and document.data:
                    yield document


def _find_all(spec: DataSpec, paths: tuple[str, ...], name: str, problems: list[str]) -> list[SourceFile]:
    """The files of all ``paths`` in order, each once."""
    found: dict[Path, SourceFile] = {}
    for path in paths:
        try:
            for file in _find(spec, path, name):
                found.setdefault(file.path, file)
        except ConfigError as error:
            problems += error.problems
    return list(found.values())


def _find(spec: DataSpec, path: str, name: str) -> list[SourceFile]:
    if path == PYTHON_STDLIB:
        return _directory(spec, Path(sysconfig.get_path("stdlib")), spec.file_pattern or "*.py", f"{name}: {path}")
    source = Path(path).expanduser()
    if source.is_file():
        return [SourceFile(source.resolve(), _format(spec, source))]
    if source.is_dir():
        return _find_in_directory(spec, source, f"{name}: {path}")
    if not glob.has_magic(path):
        raise ConfigError(f"{name}: {path!r} does not exist (working directory: {Path.cwd()}).")
    files: list[SourceFile] = []
    for match in sorted(glob.glob(str(source), recursive=True)):
        candidate = Path(match)
        if candidate.is_file() and not _excluded(candidate.as_posix(), spec.exclude):
            files.append(SourceFile(candidate.resolve(), _format(spec, candidate)))
    if not files:
        raise ConfigError(
            f"{name}: the pattern {path!r} matches no file{_unless_excluded(spec)} (working directory: {Path.cwd()})."
        )
    return files


def _find_in_directory(spec: DataSpec, directory: Path, name: str) -> list[SourceFile]:
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
        raise ConfigError(f"{name} has several splits; select one of {', '.join(splits)}, as in {directory}/SPLIT.")
    is_dataset = (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    if spec.format == "dataset" and not is_dataset:
        raise ConfigError(f"{name} was not written by save_to_disk of datasets (it has no state.json).")
    if is_dataset and spec.format in ("auto", "dataset"):
        return [SourceFile(directory.resolve(), "dataset")]
    return _directory(spec, directory, spec.file_pattern or _PATTERNS[spec.format], name)


def _directory(spec: DataSpec, root: Path, pattern: str, name: str) -> list[SourceFile]:
    """All files below ``root`` whose name matches ``pattern``, by relative path. Hidden files are excluded."""
    exclude = (*spec.exclude, *_NEVER_INCLUDED, ".*")
    relative: list[str] = []
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [entry for entry in folders if not _excluded((here / entry).as_posix(), exclude)]
        for entry in files:
            inside = (here / entry).as_posix()
            if fnmatchcase(entry, pattern) and not _excluded(inside, exclude):
                relative.append(inside)
    if not relative:
        raise ConfigError(f"{name}: no file in it matches {pattern!r}{_unless_excluded(spec)}.")
    return [SourceFile((root / inside).resolve(), _format(spec, root / inside)) for inside in sorted(relative)]


def _excluded(relative: str, patterns: tuple[str, ...]) -> bool:
    names = {relative, *relative.split("/")}
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _unless_excluded(spec: DataSpec) -> str:
    return f" once data.exclude ({', '.join(spec.exclude)}) is applied" if spec.exclude else ""


def _format(spec: DataSpec, file: Path) -> str:
    if spec.format == "dataset":
        raise ConfigError(
            f"data.format is dataset, but {str(file)!r} is a file; give the directory of a saved dataset."
        )
    if spec.format != "auto":
        return spec.format
    return next((kind for suffix, kind in _SUFFIXES.items() if file.name.endswith(suffix)), "text")

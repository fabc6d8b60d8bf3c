"""Where text comes from: files, directories, glob patterns, jsonl, parquet, saved ``datasets``, the standard library.

A :class:`Corpus` finds the files of a :class:`~ds_trainer.arguments.recipe.DataSpec` and says which of them are held
out, before it reads one. Its order follows from the paths alone: the places in the order of the recipe, inside a
directory by relative path. So every rank and every later run sees the same documents in the same order.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ds_trainer.arguments.recipe import DataSpec
from ds_trainer.data.readers import READERS, Document
from ds_trainer.utils.errors import ConfigError

PYTHON_STDLIB = "python-stdlib"
_NEVER_TEXT = ("__pycache__", "site-packages", "dist-packages")
_PATTERNS = {"auto": "*", "text": "*", "jsonl": "*.jsonl*", "parquet": "*.parquet"}
_SUFFIXES = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class SourceFile:
    """One place that documents are read from: a file, or a directory that ``datasets`` saved."""

    path: Path
    format: str


class Corpus:
    """The documents for training and for evaluation.

    Raises:
        ConfigError: a path matches nothing, or nothing is left to train on; all such problems at once.
    """

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        problems: list[str] = []
        self.eval_files = _find_all(spec, spec.eval, "data.eval", problems)
        train_files = _find_all(spec, spec.train, "data.train", problems)
        held_out = {file.path for file in self.eval_files}
        self.train_files = [file for file in train_files if file.path not in held_out]
        if train_files and not self.train_files:
            problems.append(f"data.train: all {len(train_files)} files are in data.eval too; none is left to train on.")
        if problems:
            raise ConfigError(problems)

    @property
    def has_eval(self) -> bool:
        """Whether something is set aside for evaluation."""
        return bool(self.eval_files) or self.spec.held_out_every is not None

    def train_documents(self) -> Iterator[Document]:
        """Documents to train on, without the held-out and the empty ones."""
        return self._documents(self.train_files, held_out=False if self.spec.held_out_every else None)

    def eval_documents(self) -> Iterator[Document]:
        """Documents to evaluate on, without the empty ones."""
        if self.spec.held_out_every:
            return self._documents(self.train_files, held_out=True)
        return self._documents(self.eval_files, held_out=None)

    def _documents(self, files: list[SourceFile], held_out: bool | None) -> Iterator[Document]:
        """All documents of ``files``, or with ``held_out`` given only those on that side of the split."""
        every = self.spec.held_out_every or 1
        index = 0
        for file in files:
            if file.format == "text":  # one document: no need to read it to know its side
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
    given = Path(path).expanduser()
    if given.is_file():
        return [SourceFile(given.resolve(), _format(spec, given))]
    if given.is_dir():
        return _find_in_directory(spec, given, f"{name}: {path}")
    if not glob.has_magic(path):
        raise ConfigError(f"{name}: {path!r} does not exist (looked in {Path.cwd()}).")
    files: list[SourceFile] = []
    for match in sorted(glob.glob(str(given), recursive=True)):
        candidate = Path(match)
        if candidate.is_file() and not _excluded(candidate.as_posix(), spec.exclude):
            files.append(SourceFile(candidate.resolve(), _format(spec, candidate)))
    if not files:
        raise ConfigError(
            f"{name}: the pattern {path!r} matches no file{_unless_excluded(spec)} (looked in {Path.cwd()})."
        )
    return files


def _find_in_directory(spec: DataSpec, directory: Path, name: str) -> list[SourceFile]:
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
        raise ConfigError(f"{name} holds several splits; name one of them: {', '.join(splits)} (as {directory}/SPLIT).")
    is_dataset = (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    if spec.format == "dataset" and not is_dataset:
        raise ConfigError(f"{name} is no directory that datasets' save_to_disk wrote (no state.json in it).")
    if is_dataset and spec.format in ("auto", "dataset"):
        return [SourceFile(directory.resolve(), "dataset")]
    return _directory(spec, directory, spec.file_pattern or _PATTERNS[spec.format], name)


def _directory(spec: DataSpec, root: Path, pattern: str, name: str) -> list[SourceFile]:
    """All files below ``root`` whose name matches ``pattern``, by relative path. Hidden files are left out."""
    exclude = (*spec.exclude, *_NEVER_TEXT, ".*")
    relative: list[str] = []
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [entry for entry in folders if not _excluded((here / entry).as_posix(), exclude)]
        for entry in files:
            inside = (here / entry).as_posix()
            if fnmatchcase(entry, pattern) and not _excluded(inside, exclude):
                relative.append(inside)
    if not relative:
        raise ConfigError(f"{name}: no file below it matches {pattern!r}{_unless_excluded(spec)}.")
    return [SourceFile((root / inside).resolve(), _format(spec, root / inside)) for inside in sorted(relative)]


def _excluded(relative: str, patterns: tuple[str, ...]) -> bool:
    names = {relative, *relative.split("/")}
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _unless_excluded(spec: DataSpec) -> str:
    return f" that data.exclude ({', '.join(spec.exclude)}) leaves in" if spec.exclude else ""


def _format(spec: DataSpec, file: Path) -> str:
    if spec.format == "dataset":
        raise ConfigError(f"data.format is dataset, but {str(file)!r} is a file; name the directory that was saved.")
    if spec.format != "auto":
        return spec.format
    return next((kind for suffix, kind in _SUFFIXES.items() if file.name.endswith(suffix)), "text")

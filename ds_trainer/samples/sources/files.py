"""The files of a source: found by path, directory or glob pattern, in an order that depends on the paths only."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ds_trainer.samples.sources import compression
from ds_trainer.samples.sources.compression import reason_of, uncompressed_name
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import directory_problem, shortened, user_path

PYTHON_STDLIB = "python-stdlib"
_NEVER_INCLUDED = ("__pycache__", "site-packages", "dist-packages")
_MOST_ODD = 100
_LARGE, _PROBE = (
    2**24,
    2**12,
)  # bytes: a smaller file is read at once; at each end of a larger one, so many are looked at
_NO_SAMPLES = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")

DOCUMENT_SUFFIXES: Mapping[str, str] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
"""What ``format: auto`` reads as rows where a corpus of text is wanted; every other file is a document."""

RECORD_SUFFIXES: Mapping[str, str] = {**DOCUMENT_SUFFIXES, ".json": "json", ".csv": "csv", ".tsv": "tsv"}
"""What ``format: auto`` reads as rows where samples for fine-tuning are wanted."""


@dataclass(frozen=True)
class SourceFile:
    """A file with samples, or a directory written by ``datasets``."""

    path: Path
    format: str


def find_files(spec: SourceSpec, key: str, suffixes: Mapping[str, str] = RECORD_SUFFIXES) -> list[SourceFile]:
    """The files of ``spec``, each once: paths in their order, files of a directory by relative path.

    A link keeps its own name: in the cache of the Hub, the file behind it has a hash for a name, and no suffix.

    Args:
        spec: the source.
        key: its name in messages, such as ``data.train[0]``.
        suffixes: formats by the ends of names, for ``format: auto``.

    Raises:
        ConfigError: a path matches nothing; lists all problems.
    """
    files: dict[Path, SourceFile] = {}
    problems: list[str] = []
    for path in spec.path:
        try:
            for file in _FileFinder(spec, key, suffixes).find(path):
                if (problem := _content_problem(file)) is not None:
                    problems.append(f"{key}: {problem}.")
                files.setdefault(Path(os.path.realpath(file.path)), file)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return list(files.values())


@dataclass(frozen=True)
class _FileFinder:
    spec: SourceSpec
    key: str
    suffixes: Mapping[str, str]

    def find(self, path: str) -> list[SourceFile]:
        if path == PYTHON_STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            return self._below(root, self.spec.file_pattern or "*.py", f"{self.key}: {path}")
        source = user_path(path, f"{self.key}: {path!r}")
        if os.path.realpath(source).startswith(("/proc/", "/sys/")):  # reading it could wait forever
            raise ConfigError(f"{self.key}: {path!r} is made by the kernel; write its content to a file.")
        if source.is_file():
            return [SourceFile(source.absolute(), self._format(source))]
        if problem := directory_problem(source):
            raise ConfigError(f"{self.key}: {path!r} {problem}; name a file or a directory that can be read.")
        if source.is_dir():
            return self._in_directory(source, f"{self.key}: {path}")
        here = f" (working directory: {Path.cwd()})"
        if not glob.has_magic(path):
            raise ConfigError(f"{self.key}: {shortened(path)!r} does not exist{here}.")
        matches = [Path(match) for match in sorted(glob.glob(str(source), recursive=True))]
        files = [match for match in matches if match.is_file() and not _excluded(match.as_posix(), self.spec.exclude)]
        if not files:
            raise ConfigError(f"{self.key}: the pattern {path!r} matches no file{self._unless_excluded()}{here}.")
        return [SourceFile(file.absolute(), self._format(file)) for file in files]

    def _in_directory(self, directory: Path, name: str) -> list[SourceFile]:
        if (directory / "dataset_dict.json").is_file():
            splits = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
            raise ConfigError(f"{name} has several splits; select one of {', '.join(splits)}, as in {directory}/SPLIT.")
        is_dataset = (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
        if self.spec.format == "dataset" and not is_dataset:
            raise ConfigError(f"{name} was not written by save_to_disk of datasets (it has no state.json).")
        if is_dataset and self.spec.format in ("auto", "dataset"):
            return [SourceFile(directory.absolute(), "dataset")]
        any_text = self.spec.format in ("auto", "text")
        return self._below(directory, self.spec.file_pattern or ("*" if any_text else f"*.{self.spec.format}*"), name)

    def _below(self, root: Path, pattern: str, name: str) -> list[SourceFile]:
        """All files below ``root`` whose name matches ``pattern``, by relative path. Hidden files are excluded.

        Where some are data files by their names, the others (a README, a license) are no samples for fine-tuning.
        """
        exclude = (*self.spec.exclude, *_NEVER_INCLUDED, ".*")
        relative: list[str] = []
        odd: list[str] = []
        for folder, folders, files in os.walk(root, onerror=self._refuse):
            here = Path(folder).relative_to(root)
            folders[:] = [entry for entry in folders if not _excluded((here / entry).as_posix(), exclude)]
            for entry in files:
                inside = (here / entry).as_posix()
                if fnmatchcase(entry, pattern) and not _excluded(inside, exclude):
                    (relative if os.path.isfile(root / inside) else odd).append(inside)
            if len(odd) > _MOST_ODD:  # the directory of a system
                break
        if odd:
            raise ConfigError(
                f"{name}: {listed(sorted(odd))}: no regular files (a broken link, a pipe?); remove them, or "
                "set exclude."
            )
        if not relative:
            raise ConfigError(f"{name}: no file in it matches {pattern!r}{self._unless_excluded()}.")
        chosen = [SourceFile((root / inside).absolute(), self._format(root / inside)) for inside in sorted(relative)]
        if self.suffixes is RECORD_SUFFIXES and self.spec.format == "auto" and self.spec.file_pattern is None:
            tables = [file for file in chosen if file.format != "text" and file.path.name not in _NO_SAMPLES]
            return tables or chosen
        return chosen

    def _refuse(self, error: OSError) -> None:
        raise ConfigError(f"{self.key}: {error.filename!r} {reason_of(error)}; exclude it, or allow to read it.")

    def _format(self, file: Path) -> str:
        if self.spec.format == "dataset":
            raise ConfigError(
                f"{self.key}: format is dataset, but {str(file)!r} is a file; give the directory of a saved dataset."
            )
        if self.spec.format != "auto":
            return self.spec.format
        name = uncompressed_name(file.name)
        return next((kind for suffix, kind in self.suffixes.items() if name.endswith(suffix)), "text")

    def _unless_excluded(self) -> str:
        return f" once exclude ({', '.join(self.spec.exclude)}) is applied" if self.spec.exclude else ""


def _content_problem(file: SourceFile) -> str | None:
    try:
        for path in sorted(file.path.glob("*.arrow")) if file.format == "dataset" else [file.path]:
            if (size := path.stat().st_size) <= _LARGE or compression.is_compressed(path):
                continue
            with path.open("rb") as stream:
                hole = size
                if file.format not in ("parquet", "arrow", "dataset") and hasattr(os, "SEEK_HOLE"):
                    with suppress(OSError):  # not on this file system
                        hole = os.lseek(stream.fileno(), 0, os.SEEK_HOLE)
                for place, start in (("begins", 0), ("ends", size - _PROBE), ("goes on", min(hole, size - _PROBE))):
                    stream.seek(start)
                    if not stream.read(_PROBE).strip(b"\0"):
                        which = f"{place} with NUL bytes, from byte {start:,} on"
                        return f"{str(path)!r} {which}: it was not written completely; make it again"
            if file.format == "text" and size > compression.most_bytes():
                return f"{str(path)!r} cannot be read: {compression.too_large()}"
    except OSError as error:
        return f"{str(file.path)!r} {reason_of(error)}"
    return None


def _excluded(relative: str, patterns: tuple[str, ...]) -> bool:
    names = {relative, *relative.split("/")}
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

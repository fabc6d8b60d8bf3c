"""The key of a prepared dataset: a digest of everything that decides its samples, and of nothing else.

The content of the source files counts, not their names, times or places; so do the tokenizer's files, the options, and
the code that encodes. The same content gives the same key on another machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ds_trainer.samples.prepared.block_file import writing
from ds_trainer.samples.prepared.manifest import FORMAT
from ds_trainer.samples.prepared.once import Waiting, WriterHeartbeat, made_once
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import parse_json, read_json, write_json
from ds_trainer.utils.threads import new_executor

_PART = 64 * 2**20  # bytes that one thread reads
_READ = 2**20
_CLOCK_TICK = 0.1  # seconds within which two changes of a file may get the same time
# Of the files of a tokenizer: what says where it was, and how the last batch was padded.
_NO_CONTENT = ("name_or_path", "padding", "truncation", "tokenizer_file")


class FileState(NamedTuple):
    """What changes when a file is written: with a new content at least ctime does, which no program can set."""

    size: int
    mtime: int
    ctime: int
    inode: int


def file_states(files: Sequence[str]) -> list[FileState]:
    """The present state of each file.

    Raises:
        ConfigError: some cannot be read; lists all of them.
    """
    states, problems = [], []
    for file in files:
        try:
            state = os.stat(file)
        except OSError as error:
            problems.append(f"{file} cannot be read ({error.strerror or error}).")
        else:
            states.append(FileState(state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
    if problems:
        raise ConfigError(problems)
    return states


def digest_of_files(files: Sequence[str], before: Sequence[FileState], threads: int = 1) -> str:
    """SHA-256 over sizes and contents of ``files``, in this order: all are read, 64 MiB at a time in each thread.

    Args:
        files: paths.
        before: their states, from :func:`file_states`.
        threads: that read.

    Raises:
        ConfigError: a file cannot be read, or changes meanwhile.
    """
    newest = max((max(state.mtime, state.ctime) for state in before), default=0) / 1e9
    time.sleep(min(_CLOCK_TICK, max(0.0, newest + _CLOCK_TICK - time.time())))
    parts = [
        (file, start)
        for file, state in zip(files, before, strict=True)
        for start in range(0, max(state.size, 1), _PART)
    ]
    with new_executor("digest", max(1, threads)) as executor:
        digests = list(executor.map(_digest_of_part, parts))
    check_unchanged(files, before)
    return _digest([[state.size for state in before], digests])


def check_unchanged(files: Sequence[str], before: Sequence[FileState]) -> None:
    """Raises ConfigError if a file is not in the state that it had ``before``."""
    changed = [file for file, a, b in zip(files, before, file_states(files), strict=True) if a != b]
    if changed:
        raise ConfigError(f"{', '.join(changed)} changed while it was read. Prepare when the data is complete.")


def known_digest_of_files(
    files: Sequence[str], before: Sequence[FileState], directory: Path, threads: int, waiting: Waiting
) -> str:
    """:func:`digest_of_files`, computed by one process that shares ``directory`` and then kept there.

    It is used again only while size, inode, mtime and ctime of all files are what they were.
    """
    if not os.access(directory, os.W_OK):
        return digest_of_files(files, before, threads)
    states = [[os.path.abspath(file), *state] for file, state in zip(files, before, strict=True)]
    path = directory / f"{_digest(states)[:32]}.sources.json"

    def find() -> str | None:
        try:
            value = read_json(path)
        except (OSError, ValueError):
            return None
        return value if isinstance(value, str) else None

    def make(_: WriterHeartbeat) -> str:
        value = digest_of_files(files, before, threads)
        with writing(path):
            write_json(path, value)
        return value

    return made_once(path, find, make, waiting)


def _digest_of_part(part: tuple[str, int]) -> str:
    file, start = part
    digest, remaining = hashlib.sha256(), _PART
    try:
        with open(file, "rb", buffering=0) as stream:
            stream.seek(start)
            while remaining and (data := stream.read(min(_READ, remaining))):
                digest.update(data)
                remaining -= len(data)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror or error}).") from error
    return digest.hexdigest()


def digest_of_tokenizer(tokenizer: Any) -> str:
    """SHA-256 of what ``tokenizer.save_pretrained`` writes, without paths and the settings of its last call.

    Args:
        tokenizer: one of transformers, one of this package, or anything with ``save_pretrained``.
    """
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        return _digest([[path.relative_to(directory).as_posix(), _content_of(path)] for path in files])


def _content_of(path: Path) -> Any:
    data = path.read_bytes()
    if path.suffix == ".json":
        values = parse_json(data)
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if name not in _NO_CONTENT}
    return hashlib.sha256(data).hexdigest()


def digest_of_code(*modules: str, packages: Sequence[str] = ()) -> dict[str, str]:
    """What the samples depend on apart from data and options: the source of modules and the versions of packages.

    Args:
        modules: names of modules or packages whose ``.py`` files are digested: a change of the code is a new key.
        packages: names of distributions.

    Returns:
        Values by name, for the ``identity`` of :func:`content_key`.
    """
    values = {}
    for module in modules:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ConfigError(f"{module} has no source code to digest.")
        origin = Path(spec.origin)
        files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
        values[module] = _digest([[p.relative_to(origin.parent).as_posix(), p.read_text("utf-8")] for p in files])
    return values | {package: metadata.version(package) for package in packages}


def content_key(sources: str, identity: Mapping[str, Any], dtype: str) -> tuple[str, dict[str, Any]]:
    """The key, and the content that it is the digest of.

    Args:
        sources: :func:`digest_of_files` of the source files.
        identity: plain values and dataclasses: tokenizer, template, options, code.
        dtype: type of tokens.

    Raises:
        ConfigError: ``identity`` has something whose value is not known.
    """
    try:
        plain = json.loads(json.dumps(identity, default=_plain, sort_keys=True))
    except TypeError as error:
        raise ConfigError(f"The identity of a prepared dataset consists of plain values, but {error}.") from None
    content = {"format": FORMAT, "sources": sources, "dtype": dtype, "identity": plain}
    return _digest(content), content


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"class": type(value).__qualname__, **dataclasses.asdict(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"it has a {type(value).__name__}")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

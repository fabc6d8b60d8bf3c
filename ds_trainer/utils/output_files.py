"""Files that runs write to their output directory: what a user has there under such a name is kept under a free one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json, write_json, write_text_atomic
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

RECORD = "ds_trainer_files.json"
"""Size and SHA-256 of each such file, as a run has written it last: another content is that of a user."""


def set_aside(path: Path, rename: Callable[[Path, Path], object] = os.rename) -> None:
    """Rename ``path`` to ``<stem>.previous<suffix>``, or to the first free name ``<stem>.previous-2<suffix>`` ..."""
    number, kept = 1, path.with_name(f"{path.stem}.previous{path.suffix}")
    while os.path.lexists(kept):
        number += 1
        kept = path.with_name(f"{path.stem}.previous-{number}{path.suffix}")
    rename(path, kept)
    logger.info("renamed %s, which was there before, to %s", path, kept.name)


def keep_of_user(path: Path) -> None:
    """:func:`set_aside`, unless a run has written what is at ``path``. A directory stays: nothing can replace it."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()) and not _is_of_a_run(path):
        set_aside(path)


def note_written(path: Path) -> None:
    """Record ``path`` as written by this run."""
    write_json(path.with_name(RECORD), {**_record(path), path.name: _digest(path.read_bytes())})


def write_output(path: Path, text: str) -> None:
    """:func:`~ds_trainer.utils.files.write_text_atomic` of a file of a run. That of a user is kept aside.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    keep_of_user(path)
    # Before the file: a process that ends between the two leaves a file that counts as that of a user, and is kept.
    write_json(path.with_name(RECORD), {**_record(path), path.name: _digest(text.encode())})
    write_text_atomic(path, text)


def write_output_json(path: Path, value: Any) -> None:
    """:func:`write_output` of ``value`` as indented JSON."""
    write_output(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_result(path: Path, text: str) -> None:
    """:func:`write_output` of a file without which the request has failed.

    Raises:
        ConfigError: it cannot be written; names it and the reason.
    """
    try:
        write_output(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def _is_of_a_run(path: Path) -> bool:
    noted = str(_record(path).get(path.name))
    is_file = path.is_file() and not path.is_symlink() and noted.startswith(f"{path.stat().st_size} ")
    return is_file and _digest(path.read_bytes()) == noted


def _record(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path.with_name(RECORD))
    except (OSError, ValueError):  # none, or damaged: everything is of a user
        return {}
    return record if isinstance(record, dict) else {}


def _digest(content: bytes) -> str:
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}"

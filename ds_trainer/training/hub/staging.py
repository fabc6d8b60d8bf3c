"""Stages the files of a push, so that they cannot change or disappear during the upload.

Files that are never modified in place (those of a complete checkpoint, weights) are hard-linked. Links take no space
and survive the removal of the original. All other files are copied.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

FOLDER = ".hub_push"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
# The pointer names a checkpoint of this directory; the others are about this machine.
_LEFT_OUT = ("latest", "run_history.jsonl", "run_history.previous.jsonl", "report.html", "report.json")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # written under another name, then renamed


def stage_model(output_dir: Path, target: Path) -> Path:
    """Stage ``output_dir`` without checkpoints, hidden files, and names that begin with an underscore.

    The record of the run and its report stay here too: they name paths, hosts and commands.
    """
    for path in _files(output_dir, leave_out_checkpoints=True):
        _stage(path, target / path.relative_to(output_dir), link=bool(_WEIGHTS.fullmatch(path.name)))
    return target


def stage_checkpoint(checkpoint: Path, target: Path) -> Path:
    """Stage a complete checkpoint."""
    for path in _files(checkpoint):
        _stage(path, target / path.relative_to(checkpoint), link=True)
    return target


def _files(folder: Path, leave_out_checkpoints: bool = False) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")):
            continue
        if leave_out_checkpoints and (_CHECKPOINT.match(path.name) or path.name in _LEFT_OUT):
            continue
        if path.is_file():
            found.append(path)
        elif path.is_dir() and not path.is_symlink():  # trackers link to their newest run
            found.extend(_files(path, leave_out_checkpoints))
    return found


def _stage(source: Path, target: Path, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(source, target)
            return
        except OSError:  # a file system without hard links
            pass
    shutil.copy2(source, target)

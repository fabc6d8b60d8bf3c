"""What a push sends, set aside, so that nothing can change or vanish while it is read.

Files that are never written in place (those of a finished checkpoint, weights) are linked: that costs no space, and
they outlive their removal. All others are copied.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

FOLDER = ".hub_push"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_POINTER = "latest"  # names a checkpoint of this directory
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # written beside their names, then renamed


def stage_model(output_dir: Path, target: Path) -> Path:
    """Set aside ``output_dir`` without checkpoints, hidden files, and what begins with an underscore."""
    for path in _files(output_dir, leave_out_checkpoints=True):
        _take(path, target / path.relative_to(output_dir), link=bool(_WEIGHTS.fullmatch(path.name)))
    return target


def stage_checkpoint(checkpoint: Path, target: Path) -> Path:
    """Set aside a finished checkpoint."""
    for path in _files(checkpoint):
        _take(path, target / path.relative_to(checkpoint), link=True)
    return target


def _files(folder: Path, leave_out_checkpoints: bool = False) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")):
            continue
        if leave_out_checkpoints and (_CHECKPOINT.match(path.name) or path.name == _POINTER):
            continue
        if path.is_file():
            found.append(path)
        elif path.is_dir() and not path.is_symlink():  # trackers link to their newest run
            found.extend(_files(path, leave_out_checkpoints))
    return found


def _take(source: Path, target: Path, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(source, target)
            return
        except OSError:  # a file system without links
            pass
    shutil.copy2(source, target)

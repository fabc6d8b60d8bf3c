"""What is said of the size of checkpoints before the first one, and where the disk cannot hold them."""

from __future__ import annotations

import shutil
from pathlib import Path

from ds_trainer.checkpoint.protocol.retention import bytes_on_disk
from ds_trainer.checkpoint.weights.save_size import SaveSize
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.sizes import parse_size

logger = get_logger(__name__)


def announce(size: SaveSize, output_dir: Path, limit: int | str | None) -> str:
    """Say how large a checkpoint is; warn where the disk cannot hold as many as there will be at a time.

    Args:
        size: of a checkpoint.
        output_dir: where they are written; those that are there may go to make room.
        limit: ``save_total_limit``; a new checkpoint is written before an old one goes.

    Returns:
        What was said.
    """
    free, present = shutil.disk_usage(output_dir).free, bytes_on_disk(output_dir.glob("checkpoint-*"))
    once = f" (of it {in_words(size.frozen)} frozen weights, written once)" if size.frozen else ""
    said = (
        f"A checkpoint takes {in_words(size.total)}: {in_words(size.weights)} weights{once}, {in_words(size.states)} "
        f"optimizer states; free on the disk of {output_dir}: {in_words(free)}."
    )
    if isinstance(limit, str):
        needed = max(parse_size(limit), size.of(1)) + size.total - size.frozen
    else:
        needed = size.of(1 if limit is None else limit + 1)
    if needed > free + present:
        logger.warning(
            "The disk of %s has %s free, and checkpoints will take %s: save_total_limit=%s, and a new one is written "
            "before an old one goes. Make room, lower save_total_limit, or save less often.",
            output_dir,
            in_words(free),
            in_words(needed),
            limit,
        )
    return said


def in_words(size: int) -> str:
    """Bytes as people read them."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= one:
            return f"{size / one:.1f} {unit}"
    return f"{size / 1000:.1f} kB"

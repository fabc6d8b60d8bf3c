"""Announces the size of checkpoints before the first one, and warns if the disk is too small for them."""

from __future__ import annotations

import shutil
from pathlib import Path

from ds_trainer.checkpoint.protocol.retention import bytes_on_disk
from ds_trainer.checkpoint.weights.checkpoint_size import CheckpointSize
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import parse_size

logger = get_logger(__name__)


def announce(size: CheckpointSize, output_dir: Path, limit: int | str | None) -> str:
    """Describe the size of a checkpoint, and warn if the disk is too small for ``limit`` of them.

    Args:
        size: the size of a checkpoint.
        output_dir: the directory of the checkpoints; existing ones there may be removed to make room.
        limit: ``save_total_limit``; a new checkpoint is written before an old one is removed.

    Returns:
        The text to print.
    """
    free, present = shutil.disk_usage(output_dir).free, bytes_on_disk(output_dir.glob("checkpoint-*"))
    once = f" (including {readable(size.frozen)} of frozen weights, written once)" if size.frozen else ""
    text = (
        f"A checkpoint takes {readable(size.total)}: {readable(size.weights)} weights{once}, {readable(size.states)} "
        f"optimizer states; free on the disk of {output_dir}: {readable(free)}."
    )
    if isinstance(limit, str):
        needed = max(parse_size(limit), size.of(1)) + size.total - size.frozen
    else:
        needed = size.of(1 if limit is None else limit + 1)
    if needed > free + present:
        logger.warning(
            "The disk of %s has %s free, and checkpoints will take %s: save_total_limit=%s, and a new one is written "
            "before an old one is removed. Make room, lower save_total_limit, or save less often.",
            output_dir,
            readable(free),
            readable(needed),
            limit,
        )
    return text


def readable(size: int) -> str:
    """A number of bytes with a unit."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= one:
            return f"{size / one:.1f} {unit}"
    return f"{size / 1000:.1f} kB"

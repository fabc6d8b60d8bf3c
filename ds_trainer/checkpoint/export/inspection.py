"""What a checkpoint on the disk is, and whether it is whole: nothing of it is loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ds_trainer.checkpoint.export.checkpoint_weights import CheckpointWeights
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.files import damage
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, PIECES, BrokenCheckpoint, Manifest
from ds_trainer.checkpoint.weights.description import DESCRIPTION_FILE, ModelDescription
from ds_trainer.parallel.layout import AXES
from ds_trainer.utils.errors import ConfigError


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint ``path``, or all ``checkpoint-N`` in it, the newest last, damaged ones first.

    Raises:
        ConfigError: there is none.
    """
    if (path / MANIFEST_FILE).is_file():
        return [path]
    found = [entry.path for entry in CheckpointDirectory(path).entries()]
    if not found:
        raise ConfigError(f"{path} is no checkpoint ({MANIFEST_FILE} is missing in it), and has no checkpoint-N in it.")
    return found


def newest_at(path: Path) -> Path:
    """The checkpoint ``path``, or the newest one in it whose manifest is intact.

    Raises:
        ConfigError: there is none.
    """
    found = checkpoints_at(path)
    if found == [path]:
        return path
    intact = [entry.path for entry in CheckpointDirectory(path).entries() if entry.manifest is not None]
    if not intact:
        raise ConfigError(f"{path}: all checkpoints in it are damaged ({', '.join(p.name for p in found)}).")
    return intact[-1]


def problems_of(checkpoint: Path, sums: bool = True) -> list[str]:
    """What is wrong with a checkpoint: files against its manifest, and pieces against the model. Empty if nothing is.

    Args:
        checkpoint: its directory.
        sums: read every file and compare its checksum, not only its size.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except BrokenCheckpoint as error:
        return [str(error)]
    found = [problem for record in manifest.files.values() if (problem := damage(checkpoint, record, sums))]
    if not found and DESCRIPTION_FILE in manifest.files and manifest.engine == PIECES and manifest.nodes == 1:
        try:
            described = ModelDescription.read(checkpoint).tensors
            found = CheckpointWeights(checkpoint).incomplete([t for t in described if t.kept_as is not None])
        except ConfigError as error:
            found = error.problems
    return found


def describe_checkpoint(checkpoint: Path) -> str:
    """A few lines for people.

    Raises:
        BrokenCheckpoint: its manifest is damaged.
    """
    manifest = Manifest.read(checkpoint)
    sizes = dict(manifest.layout)
    axes = [f"{axis} {sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1]
    ranks = sizes.get("world_size", 1)
    layout = f"{ranks} rank{'s' if ranks > 1 else ''}" + (f" = {' x '.join(axes)}" if axes else "")
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.written))
    rows = [
        ("step", f"{manifest.step}, number {manifest.generation} in its directory"),
        ("written", f"{written} by {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}"),
        ("layout", f"{layout}, ZeRO {manifest.zero_stage}, {manifest.precision}"),
        *_model_rows(checkpoint, manifest),
    ]
    total = sum(record.size for record in manifest.files.values())
    rows.append(("files", f"{len(manifest.files)}, {human_bytes(total)}"))
    rows += [("", f"{human_bytes(record.size):>9}  {name}") for name, record in sorted(manifest.files.items())]
    return "\n".join([str(checkpoint), *(f"  {name:<9}{value}" for name, value in rows)])


def _model_rows(checkpoint: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.only_model:
        yield "holds", "weights only: nothing to resume from"
        return
    if DESCRIPTION_FILE not in manifest.files:
        return
    model = ModelDescription.read(checkpoint)
    weights = [tensor.weight() for tensor in model.tensors]
    numbers = sum(weight.nbytes // weight.dtype.itemsize for weight in weights)
    types = sorted({tensor.dtype for tensor in model.tensors})
    yield "model", f"{model.model_class}, {numbers:,} numbers in {len(weights)} tensors of {', '.join(types)}"
    for name, configuration in model.adapters.items():
        yield "adapter", f"{name}, {configuration['peft_type']}{' (in use)' if name in model.active else ''}"
    if manifest.engine == PIECES:
        kinds = CheckpointWeights(checkpoint).kinds()
        yield "state", ", ".join(f"{kind} {human_bytes(size)}" for kind, size in kinds.items())


def human_bytes(size: float) -> str:
    """``842 B``, ``12.3 kB``, ``1.05 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"

"""Describes a checkpoint on disk and checks its integrity, without loading it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ds_trainer.checkpoint.export.checkpoint_weights import CheckpointWeights
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.file_records import find_damage
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, SHARDS, BrokenCheckpoint, Manifest
from ds_trainer.checkpoint.weights.model_description import DESCRIPTION_FILE, ModelDescription
from ds_trainer.parallel.layout import AXES
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import directory_problem
from ds_trainer.utils.units import counted, human_bytes


def find_checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoint ``path``, or all ``checkpoint-N`` in it: damaged ones first, the newest last.

    Raises:
        ConfigError: there is no checkpoint.
    """
    if (problem := directory_problem(path)) is not None:
        raise ConfigError(f"{path} {problem}. Pass a checkpoint or an output directory.")
    if (path / MANIFEST_FILE).is_file():
        return [path]
    checkpoints = [e.path for e in CheckpointDirectory(path).entries() if (e.path / MANIFEST_FILE).is_file()]
    if not checkpoints:
        raise ConfigError(
            f"{path} is not a checkpoint ({MANIFEST_FILE} is missing) and contains no checkpoint-N. Pass a checkpoint "
            "or an output directory."
        )
    return checkpoints


def newest_checkpoint(path: Path) -> Path:
    """Returns the checkpoint ``path``, or the newest one in it with an intact manifest.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    checkpoints = find_checkpoints(path)
    if checkpoints == [path]:
        return path
    intact = [entry.path for entry in CheckpointDirectory(path).entries() if entry.manifest is not None]
    if not intact:
        raise ConfigError(f"{path}: all of its checkpoints are damaged ({listed(p.name for p in checkpoints)}).")
    return intact[-1]


def checkpoint_problems(checkpoint: Path, checksums: bool = True) -> list[str]:
    """Checks the files of a checkpoint against its manifest, and its shards against the model.

    Args:
        checkpoint: the directory of the checkpoint.
        checksums: read every file and compare its checksum, not only its size.

    Returns:
        One message per problem; empty if the checkpoint is intact.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except BrokenCheckpoint as error:
        return [str(error)]
    problems = [
        problem for record in manifest.files.values() if (problem := find_damage(checkpoint, record, checksums))
    ]
    if not problems and DESCRIPTION_FILE in manifest.files and manifest.engine == SHARDS and manifest.nodes == 1:
        try:
            described = ModelDescription.read(checkpoint).tensors
            problems = CheckpointWeights(checkpoint).problems([t for t in described if t.kept_as is not None])
        except ConfigError as error:
            problems = error.problems
    return problems


def describe_checkpoint(checkpoint: Path) -> str:
    """Returns a human-readable summary of a few lines.

    Raises:
        BrokenCheckpoint: the manifest is damaged.
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
        yield "content", "weights only; training cannot resume from it"
        return
    if DESCRIPTION_FILE not in manifest.files:
        return
    model = ModelDescription.read(checkpoint)
    weights = [tensor.weight() for tensor in model.tensors]
    parameters = sum(weight.numel for weight in weights)
    types = sorted({tensor.dtype for tensor in model.tensors})
    yield (
        "model",
        f"{model.model_class}, {parameters:,} elements in {counted(len(weights), 'tensor')} of {', '.join(types)}",
    )
    for name, configuration in model.adapters.items():
        yield "adapter", f"{name}, {configuration['peft_type']}{' (active)' if name in model.active else ''}"
    if manifest.engine == SHARDS:
        kinds = CheckpointWeights(checkpoint).bytes_by_kind()
        yield "state", ", ".join(f"{kind} {human_bytes(size)}" for kind, size in kinds.items())

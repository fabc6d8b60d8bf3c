"""A checkpoint on the disk as a directory that ``from_pretrained`` loads: no GPU, no process group, little memory.

At any time one tensor of the model is in memory (of a layer with adapters that are merged: the layer).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from ds_trainer.checkpoint.export.blueprint import check_against_model
from ds_trainer.checkpoint.export.checkpoint_weights import CheckpointWeights
from ds_trainer.checkpoint.export.merging import MergedWeights, export_adapters
from ds_trainer.checkpoint.export.model_directory import describe_directory
from ds_trainer.checkpoint.pieces.engine_files import PROGRESS_FILE
from ds_trainer.checkpoint.weights.base import BaseDigest
from ds_trainer.checkpoint.weights.description import (
    CONFIGURATION_FILES,
    DESCRIPTION_FILE,
    ModelDescription,
    held_file,
)
from ds_trainer.checkpoint.weights.sections import tensor_names
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, SINGLE_FILE, plan_files
from ds_trainer.checkpoint.weights.writing import complete_configuration, write_sections
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class Exported(NamedTuple):
    """What was written: files by name with their bytes."""

    directory: Path
    files: dict[str, int]


def export_checkpoint(
    checkpoint: Path,
    directory: Path,
    max_shard_bytes: int,
    dtype: torch.dtype | None = None,
    merge_lora: bool = False,
    model: Path | None = None,
) -> Exported:
    """Write the model of ``checkpoint`` to ``directory``, which appears when it is whole.

    Args:
        checkpoint: a ``checkpoint-N`` directory, of any layout and ZeRO stage.
        directory: not there yet, or empty.
        max_shard_bytes: largest size of one file of weights; a single tensor of the model may exceed it.
        dtype: type of the numbers with a fraction; None: as the model computed with them. The checkpoint's own numbers
            (32-bit masters, where training had them) are rounded once.
        merge_lora: write whole weights with the adapters merged into them, not the adapters alone.
        model: a directory of transformers for the same model, for a checkpoint that was converted and does not say
            itself what it is of; its weights are not read. For one of adapters: the model that they belong to, where
            it is not where it was.

    Raises:
        ConfigError: the checkpoint is incomplete or of a kind that cannot be exported, a tensor has not the model's
            shape, or the directory is in use.
        WeightFilesError: a file reads back otherwise than it was written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"--to {directory}: is there already and not empty. Name a new directory.")
    has_model = (checkpoint / SINGLE_FILE).is_file() or (checkpoint / INDEX_FILE).is_file()
    if has_model and not any(checkpoint.glob("rank_*.safetensors")):
        raise ConfigError(
            f"{checkpoint} holds weights for from_pretrained already (save_only_model=True when it was written): there "
            "is nothing to export."
        )
    with ExitStack() as stack:
        described = checkpoint
        base = model if BaseDigest.read(checkpoint) is not None else None
        if model is not None and base is None:
            if (checkpoint / DESCRIPTION_FILE).is_file():
                raise ConfigError(f"--model {model}: {checkpoint} says itself what it is of. Leave it out.")
            described = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            describe_directory(model, described)
        return _export(checkpoint, described, directory, max_shard_bytes, dtype, merge_lora, base)


def _export(
    checkpoint: Path,
    described: Path,
    directory: Path,
    max_shard_bytes: int,
    dtype: torch.dtype | None,
    merge_lora: bool,
    base: Path | None,
) -> Exported:
    """Write the weights in ``checkpoint`` of the model that ``described`` holds the description of."""
    description = ModelDescription.read(described)
    if merge_lora and not description.adapters:
        raise ConfigError(f"--merge-lora: the model of {checkpoint} has no adapters. Leave it out.")
    _refuse_weights_of_training(checkpoint)
    source = CheckpointWeights(checkpoint, base)
    alone = bool(description.adapters) and not merge_lora
    if problems := source.incomplete([t for t in description.tensors if t.adapter or not alone]):
        raise ConfigError(problems)
    # The directory's own name, hidden: on the same file system, so that it is renamed in one go.
    partial = directory.absolute().with_name(f".{directory.absolute().name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        _copy_files(described, description, partial, alone)
        if alone:
            export_adapters(source, description, partial, dtype)
        else:
            _write_weights(source, described, description, partial, max_shard_bytes, dtype)
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return Exported(directory, {path.relative_to(directory).as_posix(): path.stat().st_size for path in found})


def _copy_files(checkpoint: Path, description: ModelDescription, directory: Path, alone: bool) -> None:
    for name in description.files:
        if not (alone and name in CONFIGURATION_FILES):  # an adapter's configuration is its own
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(held_file(checkpoint, name), target)


def _write_weights(
    source: CheckpointWeights,
    described: Path,
    description: ModelDescription,
    directory: Path,
    max_shard_bytes: int,
    dtype: torch.dtype | None,
) -> None:
    """Write whole weights; adapters, where there are any, are merged into them."""
    if description.adapters:
        merged = MergedWeights(source, description, dtype)
        sections, read = merged.sections, merged.read
    else:
        # Without transformers the shapes that the live model had are all there is to compare with.
        known = description.from_transformers and "config.json" in description.files
        if known and importlib.util.find_spec("transformers") is not None:
            unknown = check_against_model(described, description)
            if unknown:
                logger.warning("%s does not know: %s.", description.model_class, ", ".join(unknown))
        sections = description.sections_as(dtype)
        by_name = {tensor.name: tensor for tensor in description.tensors}

        def read(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
            for name in names:
                yield name, source.read(by_name[name], by_name[name].weight(dtype).dtype)

    files = plan_files(sections, max_shard_bytes)
    write_sections(directory, files, chain.from_iterable(read(tensor_names(file)) for file in files))
    complete_configuration(directory, description.model_class, [section.dtype for section in sections])


def _refuse_weights_of_training(checkpoint: Path) -> None:
    """A schedule-free optimizer evaluates other weights than it trains; a checkpoint holds those of training."""
    path = checkpoint / PROGRESS_FILE
    groups = torch.load(path, weights_only=True)["groups"] if path.is_file() else []
    if any(group.get("train_mode") for group in groups):
        raise ConfigError(
            f"{checkpoint} was written with a schedule-free optimizer, whose weights for evaluation are others than "
            "those that it trains and keeps. In a script, train(resume_from_checkpoint=...) and save_model() write "
            "them."
        )

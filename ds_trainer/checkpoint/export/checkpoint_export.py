"""Exports a checkpoint to a directory that ``from_pretrained`` loads: no GPU, no process group, little memory.

One tensor of the model is in memory at a time; when adapters are merged, one layer.
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

from ds_trainer.checkpoint.export.adapter_merging import MergedWeights, export_adapters
from ds_trainer.checkpoint.export.checkpoint_weights import CheckpointWeights, WholeTensors
from ds_trainer.checkpoint.export.meta_model import check_against_model
from ds_trainer.checkpoint.shards.engine_files import CLIENT_STATE_FILE
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.checkpoint.weights.model_description import (
    CONFIGURATION_FILES,
    DESCRIPTION_FILE,
    ModelDescription,
    description_files,
    stored_file,
)
from ds_trainer.checkpoint.weights.model_saving import complete_configuration, write_sections
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, SINGLE_FILE, plan_files, tensor_names
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import new_output, new_partial
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


class ExportResult(NamedTuple):
    """The exported directory, and the size of each file by name."""

    directory: Path
    files: dict[str, int]


def export_checkpoint(
    checkpoint: Path,
    directory: Path,
    max_shard_bytes: int,
    dtype: torch.dtype | None = None,
    merge_lora: bool = False,
    model: Path | None = None,
) -> ExportResult:
    """Write the model of ``checkpoint`` to ``directory``, which is created atomically when the export is complete.

    Args:
        checkpoint: a ``checkpoint-N`` directory of any layout and ZeRO stage.
        directory: must not exist, or be empty.
        max_shard_bytes: maximum size of one weight file; a single tensor may exceed it.
        dtype: dtype of floating-point tensors; None: the dtype in which the model computed. The stored values
            (32-bit master weights if training had them) are rounded once.
        merge_lora: write full weights with the adapters merged into them instead of only the adapters.
        model: a transformers directory of the same model, for a converted checkpoint that does not describe its
            model; its weights are not read. For adapters: the directory of the base model, if it has moved.

    Raises:
        ConfigError: the checkpoint is incomplete or cannot be exported, the shape of a tensor does not match the
            model, or the directory is not empty.
        WeightFilesError: a file reads back differently than it was written.
    """
    new_output(directory, "--to", "directory")
    has_model = (checkpoint / SINGLE_FILE).is_file() or (checkpoint / INDEX_FILE).is_file()
    if has_model and not any(checkpoint.glob("rank_*.safetensors")):
        raise ConfigError(
            f"{checkpoint} was written with save_only_model=True: from_pretrained loads it directly, so there is "
            "nothing to export."
        )
    with ExitStack() as stack:
        described = checkpoint
        base = model if BaseDigest.read(checkpoint) is not None else None
        if model is not None and base is None:
            if (checkpoint / DESCRIPTION_FILE).is_file():
                raise ConfigError(f"--model {model}: {checkpoint} describes its model itself. Remove --model.")
            described = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            describe_directory(model, described)
        return _export(
            checkpoint=checkpoint,
            described=described,
            directory=directory,
            max_shard_bytes=max_shard_bytes,
            dtype=dtype,
            merge_lora=merge_lora,
            base=base,
        )


def _export(
    checkpoint: Path,
    described: Path,
    directory: Path,
    max_shard_bytes: int,
    dtype: torch.dtype | None,
    merge_lora: bool,
    base: Path | None,
) -> ExportResult:
    """Write the weights in ``checkpoint``; ``described`` is the directory with the description of the model."""
    description = ModelDescription.read(described)
    if merge_lora and not description.adapters:
        raise ConfigError(f"--merge-lora: the model of {checkpoint} has no adapters. Remove --merge-lora.")
    # The checkpoint of a schedule-free optimizer holds its training weights, not its evaluation weights.
    path = checkpoint / CLIENT_STATE_FILE
    groups = torch.load(path, weights_only=True)["groups"] if path.is_file() else []
    if any(group.get("train_mode") for group in groups):
        raise ConfigError(
            f"{checkpoint} was written with a schedule-free optimizer. It contains the training weights, which differ "
            "from the evaluation weights. In a script, call train(resume_from_checkpoint=...) and save_model() to "
            "write the evaluation weights."
        )
    source = CheckpointWeights(checkpoint, base)
    adapters_only = bool(description.adapters) and not merge_lora
    if problems := source.problems([t for t in description.tensors if t.adapter or not adapters_only]):
        raise ConfigError(problems)
    return write_model(source, described, directory, max_shard_bytes, dtype, adapters_only)


def write_model(
    source: WholeTensors,
    described: Path,
    directory: Path,
    max_shard_bytes: int,
    dtype: torch.dtype | None = None,
    adapters_only: bool = False,
) -> ExportResult:
    """Write the tensors of ``source`` to ``directory``, which is created when everything is written.

    Args:
        source: reads the tensors.
        described: a directory with the files of :func:`description_files`.
        directory: must not exist, or be empty.
        max_shard_bytes: maximum size of one weight file.
        dtype: dtype of floating-point tensors; None: as described.
        adapters_only: write only the adapters; otherwise adapters are merged into the weights.

    Raises:
        ConfigError: the model cannot be built from its configuration, or its adapters cannot be merged.
        WeightFilesError: a file reads back differently than it was written.
    """
    description = ModelDescription.read(described)
    partial = new_partial(directory.absolute())
    try:
        for name in description.files:
            if not (adapters_only and name in CONFIGURATION_FILES):  # adapters have their own configuration
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(stored_file(described, name), target)
        if adapters_only:
            export_adapters(source, description, partial, dtype)
        else:
            _write_weights(source, described, description, partial, max_shard_bytes, dtype)
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return ExportResult(directory, {path.relative_to(directory).as_posix(): path.stat().st_size for path in files})


def _write_weights(
    source: WholeTensors,
    described: Path,
    description: ModelDescription,
    directory: Path,
    max_shard_bytes: int,
    dtype: torch.dtype | None,
) -> None:
    """Write full weights, with adapters merged into them if there are any."""
    if description.adapters:
        merged = MergedWeights(source, description, dtype)
        sections, read = merged.sections, merged.read
    else:
        # Without transformers, the description is the only source of shapes.
        known = description.from_transformers and "config.json" in description.files
        if known and importlib.util.find_spec("transformers") is not None:
            unknown = check_against_model(described, description)
            if unknown:
                logger.warning(
                    "%s has no tensors named %s; they are exported anyway.", description.model_class, ", ".join(unknown)
                )
        sections = description.file_sections(dtype)
        by_name = {tensor.name: tensor for tensor in description.tensors}

        def read(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
            for name in names:
                yield name, source.read(by_name[name], by_name[name].weight(dtype).dtype)

    files = plan_files(sections, max_shard_bytes)
    write_sections(directory, files, chain.from_iterable(read(tensor_names(file)) for file in files))
    complete_configuration(directory, description.model_class, [section.dtype for section in sections])


def describe_directory(model: Path, target: Path) -> ModelDescription:
    """Write the description that a checkpoint of the model in ``model`` would contain to ``target``.

    Args:
        model: a directory with ``config.json`` and, optionally, tokenizer files; weights are not read.
        target: an existing directory.

    Raises:
        ConfigError: there is no ``config.json``, or it names no class of the installed transformers.
    """
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: config.json is missing. Pass the directory that the model was loaded from."
        )
    try:
        import transformers
    except ModuleNotFoundError:
        raise ConfigError(f"--model {model} requires transformers: pip install 'ds-trainer[hf]'.") from None
    config = transformers.AutoConfig.from_pretrained(str(model))
    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if len(names) == 1 else None
    if model_class is None:
        raise ConfigError(
            f"--model {model}: architectures in its config.json is {names or 'empty'}; it must list exactly one class "
            f"of transformers {transformers.__version__}."
        )
    with torch.device("meta"):
        meta_model = model_class(config)
    if isinstance(config.dtype, torch.dtype):
        meta_model.to(config.dtype)
    if (model / "generation_config.json").is_file():
        meta_model.generation_config = transformers.GenerationConfig.from_pretrained(str(model))
    has_tokenizer = (model / "tokenizer_config.json").is_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model)) if has_tokenizer else None
    for file in description_files(meta_model, tokenizer):
        (target / file.name).parent.mkdir(parents=True, exist_ok=True)
        with (target / file.name).open("wb") as stream:
            file.write(stream)
    return ModelDescription.read(target)

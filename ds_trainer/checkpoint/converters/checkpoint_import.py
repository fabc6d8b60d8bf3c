"""Converts a checkpoint and adds a manifest: in a hidden directory to resume from, or published as checkpoint-N."""

from __future__ import annotations

import time
from pathlib import Path

from ds_trainer.checkpoint.converters.conversion import ConversionResult, other_format_at, write_native
from ds_trainer.checkpoint.converters.deepspeed_reader import model_files
from ds_trainer.checkpoint.converters.transformers_reader import RunningModel
from ds_trainer.checkpoint.converters.universal_writer import write_universal
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.file_writer import CheckpointFileWriter
from ds_trainer.checkpoint.protocol.manifest import Manifest, records_by_name, versions
from ds_trainer.checkpoint.protocol.other_formats import (
    CheckpointFormat,
    ConvertibleCheckpoint,
    check_pickles,
    load_deepspeed_pickle,
)
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json


def import_hidden(
    checkpoint: ConvertibleCheckpoint,
    directory: CheckpointDirectory,
    trusted: bool,
    node: int = 0,
    nodes: int = 1,
    save_id: str = "",
    running_model: RunningModel | None = None,
) -> tuple[Path, ConversionResult]:
    """Convert ``checkpoint`` to a complete checkpoint with a manifest, in a hidden directory inside ``directory``.

    If the process is killed, :meth:`CheckpointDirectory.tidy` removes the remains.

    Args:
        checkpoint: the checkpoint to convert.
        directory: the parent of the hidden directory.
        trusted: unpickle arbitrary objects in the checkpoint.
        node, nodes, save_id: values for the manifest if each node converts its own copy.
        running_model: the model of the resuming run; required for transformers.Trainer checkpoints without DeepSpeed.

    Raises:
        ConfigError: the checkpoint cannot be converted or written; partial files are removed.
    """
    check_pickles(checkpoint.files, trusted)
    step = _step_of(checkpoint, trusted)
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        partial = directory.begin(step)
        try:
            files = CheckpointFileWriter(partial)
            converted = write_native(checkpoint, files, trusted, running_model)
            Manifest(
                step=converted.step,
                generation=directory.next_generation(),
                save_id=save_id or partial.name.split(".")[2],
                node=node,
                nodes=nodes,
                arguments="",
                written=time.time(),
                versions=versions(),
                files=records_by_name(files.records),
                **converted.facts,
            ).write(files)
            disk.flush_file(partial)
        except BaseException:
            disk.remove_tree(partial)
            raise
    except OSError as error:
        raise ConfigError(f"{checkpoint.path} could not be converted in {directory.path}: {error}.") from error
    return partial, converted


def _step_of(checkpoint: ConvertibleCheckpoint, trusted: bool) -> int:
    if checkpoint.format is CheckpointFormat.HF_TRAINER:
        return int(read_json(checkpoint.path / "trainer_state.json")["global_step"])
    return int(load_deepspeed_pickle(model_files(checkpoint.files)[0], trusted)["global_steps"])


def import_checkpoint(source: Path, to: Path, trusted: bool = False) -> tuple[Path, ConversionResult]:
    """Convert a checkpoint of DeepSpeed or transformers into ``to/checkpoint-<step>``.

    Raises:
        ConfigError: the target exists, or as :func:`import_hidden`.
    """
    checkpoint, directory = other_format_at(source), CheckpointDirectory(to)
    check_pickles(checkpoint.files, trusted)
    final = to / f"checkpoint-{_step_of(checkpoint, trusted)}"
    if final.exists():
        raise ConfigError(f"{final} already exists. Choose another directory, or remove it.")
    partial, converted = import_hidden(checkpoint, directory, trusted)
    directory.publish(partial, converted.step)
    return final, converted


def export_universal(checkpoint: Path, to: Path) -> Path:
    """Write a native checkpoint in DeepSpeed's universal format; returns the directory of the step.

    Raises:
        ConfigError: it contains only weights, or DeepSpeed wrote its engine state.
        BrokenCheckpoint: it is not a checkpoint, or it is damaged.
    """
    manifest = Manifest.read(checkpoint)
    if manifest.only_model or manifest.engine != "pieces":
        content = "only weights" if manifest.only_model else "engine state that DeepSpeed wrote"
        raise ConfigError(f"{checkpoint} contains {content}, which cannot be written in DeepSpeed's universal format.")
    return write_universal(checkpoint, to, manifest.step)

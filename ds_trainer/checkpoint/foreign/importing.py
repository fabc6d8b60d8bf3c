"""A converted checkpoint with its manifest: under a hidden name to resume from, or published under its own."""

from __future__ import annotations

import time
from pathlib import Path

from ds_trainer.checkpoint.foreign.convert import Converted, foreign_at, write_as_ours
from ds_trainer.checkpoint.foreign.engine_shards import model_files
from ds_trainer.checkpoint.foreign.plain_trainer import RunningModel
from ds_trainer.checkpoint.foreign.universal import write_universal
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.files import CheckpointFiles
from ds_trainer.checkpoint.protocol.foreign_formats import Foreign, Kind, check_pickles, read_foreign
from ds_trainer.checkpoint.protocol.manifest import Manifest, records_by_name, versions
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_json


def import_hidden(
    foreign: Foreign,
    directory: CheckpointDirectory,
    trusted: bool,
    node: int = 0,
    nodes: int = 1,
    save_id: str = "",
    here: RunningModel | None = None,
) -> tuple[Path, Converted]:
    """Convert ``foreign`` into a hidden directory of ``directory``; whole, with a manifest.

    A process that is killed leaves it behind for :meth:`CheckpointDirectory.tidy`.

    Args:
        foreign: what is converted.
        directory: where the hidden directory is made.
        trusted: unpickle whatever is in it.
        node, nodes, save_id: for the manifest, where each machine converts for itself.
        here: the model that goes on, which a checkpoint of transformers.Trainer without DeepSpeed needs.

    Raises:
        ConfigError: it cannot be converted, or not written; nothing of it is left.
    """
    check_pickles(foreign.files, trusted)
    step = _steps(foreign, trusted)
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        partial = directory.begin(step)
        try:
            files = CheckpointFiles(partial)
            converted = write_as_ours(foreign, files, trusted, here)
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
        raise ConfigError(f"{foreign.path} could not be converted in {directory.path}: {error}.") from error
    return partial, converted


def _steps(foreign: Foreign, trusted: bool) -> int:
    if foreign.kind is Kind.PLAIN_TRAINER:
        return int(read_json(foreign.path / "trainer_state.json")["global_step"])
    return int(read_foreign(model_files(foreign.files)[0], trusted)["global_steps"])


def import_checkpoint(source: Path, to: Path, trusted: bool = False) -> tuple[Path, Converted]:
    """Convert a checkpoint of DeepSpeed or transformers into ``to/checkpoint-<step>``.

    Raises:
        ConfigError: there is one already, or as :func:`import_hidden`.
    """
    foreign, directory = foreign_at(source), CheckpointDirectory(to)
    partial, converted = import_hidden(foreign, directory, trusted)
    final = to / f"checkpoint-{converted.step}"
    if final.exists():
        disk.remove_tree(partial)
        raise ConfigError(f"{final} exists. Name another directory, or remove it.")
    directory.publish(partial, converted.step)
    return final, converted


def export_universal(checkpoint: Path, to: Path) -> Path:
    """Write one of our checkpoints in DeepSpeed's universal form; gives the directory of the step.

    Raises:
        ConfigError: it holds weights only, or DeepSpeed wrote its engine's state.
        BrokenCheckpoint: it is none, or damaged.
    """
    manifest = Manifest.read(checkpoint)
    if manifest.only_model or manifest.engine != "pieces":
        held = "weights only" if manifest.only_model else "an engine's state as DeepSpeed wrote it"
        raise ConfigError(f"{checkpoint} holds {held}: there is nothing to write in DeepSpeed's universal form.")
    return write_universal(checkpoint, to, manifest.step)

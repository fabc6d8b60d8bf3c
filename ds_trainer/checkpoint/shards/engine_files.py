"""The engine's state in the files of a checkpoint.

``rank_00000.safetensors``           a rank's shards (``rank_00000.1.safetensors`` ...: what DeepSpeed had swapped out)
``model.safetensors``                the model, which all ranks write together (or ``model-00001-of-0000N.safetensors``)
``rank_00000.frozen.safetensors``    a rank's part of the frozen weights, or its location in the model's files
``extras_00000.pt``                  a rank's states that are not one value per element of a parameter
``progress.pt``                      DeepSpeed's client state (counters and settings), written by the main process
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile, InMemoryFile, load_pickle
from ds_trainer.checkpoint.protocol.writer_group import WriterGroup
from ds_trainer.checkpoint.shards.frozen_weights import FrozenContent, FrozenFiles
from ds_trainer.checkpoint.shards.model_plan import ModelPlan, TensorLocation
from ds_trainer.checkpoint.shards.shard_content import ShardContent
from ds_trainer.engine.state.client_state import read_client_state, write_client_state
from ds_trainer.engine.state.state_shards import (
    StateShard,
    frozen_shards,
    read_state_shards,
    replicated_writers,
    write_state_shards,
)
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

CLIENT_STATE_FILE = "progress.pt"  # the name that format 1 of the checkpoints has for it


def _extras_file(rank: int) -> str:
    return f"extras_{rank:05d}.pt"


def engine_state_files(
    engine: TrainingEngine,
    with_client_state: bool,
    model: ModelPlan | None = None,
    frozen: FrozenFiles | None = None,
    excluded: Collection[str] = (),
) -> Iterator[CheckpointFile]:
    """Yields this rank's part of the engine's state. Write each shard file before requesting the next one.

    Args:
        engine: whose state is read.
        with_client_state: whether this rank writes what is the same on all ranks.
        model: the files that hold the weights for ``from_pretrained``; None for a checkpoint without a model.
        frozen: knows the frozen weights, and where they are stored already; makes the call collective.
        excluded: names of frozen parameters that the checkpoint does not hold.

    Raises:
        UnknownState: the state of this DeepSpeed optimizer is known to DeepSpeed only.
    """
    rank = distributed.rank()
    engine.follow_written_weights()

    def locate(shard: StateShard) -> TensorLocation | None:
        return None if model is None else model.stored(shard, with_client_state)

    frozen = frozen or FrozenFiles()
    frozen_parameters = frozen.names.difference(excluded)
    if frozen_parameters:
        shards_of = frozen_shards(engine, frozen_parameters)
        file = frozen.file(FrozenContent(f"rank_{rank:05d}.frozen.safetensors", shards_of, {}, locate))
        if any(len(shard.slice) for shard in shards_of):
            yield file
    extras: dict[str, dict[str, Any]] = {}
    for part, state in enumerate(read_state_shards(engine, {*frozen_parameters, *excluded})):
        extras.update(state.extras)
        name = f"rank_{rank:05d}{f'.{part}' if part else ''}.safetensors"
        yield ShardContent(name, state.tensors, state.scalars, locate)
    if extras:
        yield InMemoryFile.of(_extras_file(rank), extras)
    if with_client_state:
        if model is not None and model.index is not None:
            yield model.index
        yield InMemoryFile.of(CLIENT_STATE_FILE, read_client_state(engine.deepspeed))


def _writers_of(engine: TrainingEngine, rank: int) -> list[int]:
    """The ranks that wrote what ``rank`` holds, in the same layout. Nearly everything was written by ``rank`` itself.

    The first tensor-parallel rank wrote the tensors that are not partitioned, and a few data-parallel ranks wrote what
    all of them replicate.
    """
    layout = engine.layout
    coordinates = layout.coordinates(rank)
    writers = [rank, layout.rank_at(coordinates.dp, coordinates.cp, coordinates.sp)]
    for writer in tuple(writers):
        group = layout.group_of(writer, ("dp", "cp", "sp"))
        writers += [group[index] for index in replicated_writers(len(group))]
    return list(dict.fromkeys(writers))


def restore_engine_state(
    engine: TrainingEngine,
    directory: Path,
    same_layout: bool,
    keep: Collection[str] = (),
    names: Collection[str] | None = None,
    trusted: bool = False,
    states: bool = True,
    writer_group: WriterGroup | None = None,
    excluded: Collection[str] = (),
) -> None:
    """Restore what :func:`engine_state_files` wrote, in any layout. Collective.

    Args:
        engine: whose state is replaced.
        directory: the checkpoint.
        same_layout: whether the checkpoint was written in the engine's layout, world size and ZeRO stage.
        keep: settings that keep their present values (:func:`ds_trainer.engine.state.client_state.write_client_state`).
        names: files of the checkpoint; default: all that exist.
        trusted: whether pickles may hold more than plain values (:func:`load_pickle`).
        states: False skips optimizer states and settings, for another optimizer.
        writer_group: the ranks that see the same ``directory``; default: all.
        excluded: names of frozen parameters that the checkpoint does not hold.

    Raises:
        ConfigError: the checkpoint lacks something that this layout needs, or can be read in its own layout only.
    """
    from ds_trainer.checkpoint.shards.shard_source import ShardSource, WeightsOnlySource, open_shard_source

    rank = distributed.rank()
    present = sorted(path.name for path in directory.iterdir()) if names is None else sorted(names)
    extras: dict[str, dict[str, Any]] = {}
    extras_files = [name for name in present if states and fnmatch(name, "extras_*.pt")]
    if same_layout and _extras_file(rank) in extras_files:
        extras = load_pickle(directory / _extras_file(rank), trusted)
    elif not same_layout and extras_files:
        by_parameter = load_pickle(directory / extras_files[0], trusted)
        keys = sorted({key for states in by_parameter.values() for key in states})
        raise ConfigError(
            f"{directory}: the optimizer has states ({', '.join(keys)}) that are not one value per element of a "
            "parameter, so they cannot be resharded. Resume with the layout and ZeRO stage that wrote them, or start a "
            f"new run with start_from_weights={str(directory)!r}."
        )
    shard_files = [name for name in present if fnmatch(name, "rank_*.safetensors")]
    if same_layout:
        prefixes = [f"rank_{writer:05d}." for writer in _writers_of(engine, rank)]
        first = [name for prefix in prefixes for name in shard_files if name.startswith(prefix)]
        source = ShardSource([directory / name for name in dict.fromkeys([*first, *shard_files])], extras)
    else:
        source = open_shard_source(directory, shard_files, writer_group)
    write_state_shards(engine, source if states else WeightsOnlySource(source), excluded)
    client_state = load_pickle(directory / CLIENT_STATE_FILE, trusted)
    if not states:
        client_state["groups"] = read_client_state(engine.deepspeed)["groups"]
    write_client_state(engine.deepspeed, client_state, keep)

"""An engine's state in the files of a checkpoint.

``rank_00000.safetensors``: a rank's pieces (``rank_00000.1.safetensors`` and so on: what DeepSpeed had swapped out).
``model.safetensors`` or ``model-00001-of-0000N.safetensors``: the model, which all ranks write together.
``rank_00000.frozen.safetensors``: a rank's part of the weights that stay as they are, or where it lies in the model.
``extras_00000.pt``: its states that are no pieces. ``progress.pt``: counters and settings, from the main process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.pieces.content import PiecesContent
from ds_trainer.checkpoint.pieces.frozen import FrozenContent, FrozenFiles
from ds_trainer.checkpoint.pieces.model_plan import ModelPlan, StoredTensor
from ds_trainer.checkpoint.pieces.source import OnlyWeights, PiecesSource, shared_source
from ds_trainer.checkpoint.protocol.contents import Content, Held
from ds_trainer.checkpoint.protocol.pickles import load_pickle
from ds_trainer.checkpoint.protocol.sharing import Sharing
from ds_trainer.engine.state.pieces import Piece, frozen_pieces, read_pieces, write_pieces, writers_of_replicas
from ds_trainer.engine.state.progress import read_progress, write_progress
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

PROGRESS_FILE = "progress.pt"


def _pieces_file(rank: int, part: int) -> str:
    return f"rank_{rank:05d}" + (f".{part}" if part else "") + ".safetensors"


def frozen_file(rank: int) -> str:
    """The name of a rank's file of weights that no optimizer steps."""
    return f"rank_{rank:05d}.frozen.safetensors"


def _extras_file(rank: int) -> str:
    return f"extras_{rank:05d}.pt"


def engine_contents(
    engine: TrainingEngine,
    with_progress: bool,
    model: ModelPlan | None = None,
    frozen: FrozenFiles | None = None,
    left_out: Collection[str] = (),
) -> Iterator[Content]:
    """This rank's part of the engine's state, file by file; a file of pieces must be written before the next is taken.

    Args:
        engine: whose state is read.
        with_progress: this rank writes what is alike on all of them.
        model: the files that hold the weights for ``from_pretrained``; None for a checkpoint without them.
        frozen: knows which weights stay as they are, and where they are stored already; collective then.
        left_out: names of frozen parameters that the checkpoint is not to hold.

    Raises:
        UnknownState: DeepSpeed's optimizer is none whose state is known.
    """
    rank = distributed.rank()

    def stored(piece: Piece) -> StoredTensor | None:
        return None if model is None else model.stored(piece, with_progress)

    frozen = frozen or FrozenFiles()
    staying = frozen.names.difference(left_out)
    if staying:
        pieces_of = frozen_pieces(engine, staying)
        content = frozen.content(FrozenContent(frozen_file(rank), pieces_of, {}, stored))
        if any(len(piece.place) for piece in pieces_of):
            yield content
    extras: dict[str, dict[str, Any]] = {}
    for part, pieces in enumerate(read_pieces(engine, {*staying, *left_out})):
        extras.update(pieces.extras)
        yield PiecesContent(_pieces_file(rank, part), pieces.tensors, pieces.scalars, stored)
    if extras:
        yield Held.of(_extras_file(rank), extras)
    if with_progress:
        if model is not None and model.index is not None:
            yield model.index
        yield Held.of(PROGRESS_FILE, read_progress(engine.deepspeed))


def _ranks_to_look_at(engine: TrainingEngine, rank: int) -> list[int]:
    """In the same layout: who wrote what ``rank`` holds. Nearly always that is ``rank`` itself.

    Of what all tensor-parallel ranks hold whole, the first one wrote; of what all data-parallel ranks hold, a few.
    """
    layout = engine.layout
    place = layout.coordinates(rank)
    found = [rank, layout.rank_at(place.dp, place.cp, place.sp)]
    for one in tuple(found):
        group = layout.group_of(one, ("dp", "cp", "sp"))
        found += [group[index] for index in writers_of_replicas(len(group))]
    return list(dict.fromkeys(found))


def read_engine_files(
    engine: TrainingEngine,
    directory: Path,
    same_layout: bool,
    keep: Collection[str] = (),
    names: Collection[str] | None = None,
    trusted: bool = False,
    states: bool = True,
    sharing: Sharing | None = None,
    left_out: Collection[str] = (),
) -> None:
    """Put back what :func:`engine_contents` gave, whatever the layout now. Collective.

    Args:
        engine: whose state is replaced.
        directory: the checkpoint.
        same_layout: it was written by as many ranks in the same layout and ZeRO stage.
        keep: settings that stay as they are (:func:`ds_trainer.engine.state.progress.write_progress`).
        names: files of the checkpoint; default: all that are there.
        trusted: whether pickles may be read that hold more than plain values
            (:mod:`ds_trainer.checkpoint.protocol.pickles`).
        states: False leaves out the states of the optimizer, and its settings: for another optimizer.
        sharing: the ranks that see the same ``directory``; default: all.
        left_out: names of frozen parameters that the checkpoint does not hold.

    Raises:
        ConfigError: something that this layout needs is missing, or can be read in its own layout only.
    """
    rank = distributed.rank()
    present = sorted(path.name for path in directory.iterdir()) if names is None else sorted(names)
    extras: dict[str, dict[str, Any]] = {}
    with_extras = [name for name in present if states and fnmatch(name, "extras_*.pt")]
    if same_layout and _extras_file(rank) in with_extras:
        extras = load_pickle(directory / _extras_file(rank), trusted)
    elif not same_layout and with_extras:
        found = load_pickle(directory / with_extras[0], trusted)
        keys = sorted({key for states in found.values() for key in states})
        raise ConfigError(
            f"{directory}: the optimizer has states ({', '.join(keys)}) that are not one number for each element of a "
            "parameter, so they cannot be cut anew. Resume with the layout and ZeRO stage that wrote them, or start "
            "anew from its weights."
        )
    pieces = [name for name in present if fnmatch(name, "rank_*.safetensors")]
    if same_layout:
        likely = [f"rank_{one:05d}." for one in _ranks_to_look_at(engine, rank)]
        first = [name for start in likely for name in pieces if name.startswith(start)]
        source = PiecesSource([directory / name for name in dict.fromkeys([*first, *pieces])], extras)
    else:
        source = shared_source(directory, pieces, sharing)
    write_pieces(engine, source if states else OnlyWeights(source), left_out)
    progress = load_pickle(directory / PROGRESS_FILE, trusted)
    if not states:
        progress["groups"] = read_progress(engine.deepspeed)["groups"]
    write_progress(engine.deepspeed, progress, keep)

"""Which files a rank opens to resume: its own in the same layout, those it needs in another one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.pieces import piece_map as maps
from ds_trainer.checkpoint.pieces.file import PiecesFile, write_pieces_file
from ds_trainer.checkpoint.pieces.piece_map import map_together
from ds_trainer.checkpoint.pieces.source import PiecesSource
from ds_trainer.engine.state import pieces as state_pieces
from ds_trainer.engine.state.pieces import MASTER, WEIGHT, Piece, writers_of_replicas
from ds_trainer.parallel.places import Place
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.opens import opened
from tests.support.pool import pool
from tests.support.runs import trajectory_of


class Narrow(nn.Module):
    """Its only bias has fewer elements than four ranks, so that some have padding only; it has a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.frozen, self.head = nn.Linear(16, 16, bias=False), nn.Linear(16, 3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.frozen(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(40, 16, generator=generator)
        self.labels = torch.randint(0, 3, (40,), generator=generator)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def train(
    output_dir: str,
    resume: str | None = None,
    narrow: bool = False,
    writers: int = 16,
    as_before: bool = False,
    **arguments: Any,
) -> tuple[list[str], Any]:
    """The files of pieces that this rank opened to go on, and what came of it."""
    values: dict[str, Any] = dict(
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        weight_decay=0.1,
        learning_rate=0.01,
    )
    values.update(per_device_train_batch_size=2, save_async=False)
    args = TrainingArguments(output_dir, **{**values, **arguments})
    model, data = (Narrow(), Rows()) if narrow else (tiny_llama(), RaggedTokens(40))
    trainer = Trainer(model, args, train_dataset=data)
    kept, read_unit = state_pieces.MOST_WRITERS, state_pieces._read_unit
    state_pieces.MOST_WRITERS = writers
    if as_before:  # checkpoints had no pieces without elements

        def without(engine: Any, unit: Any, numbers: Any, into: Any) -> None:
            read_unit(engine, unit, numbers, into)
            into.tensors[:] = [piece for piece in into.tensors if len(piece.place)]

        state_pieces._read_unit = without
    try:
        with opened(Path(resume or output_dir).resolve()) as names:
            trainer.train(resume_from_checkpoint=resume)
    finally:
        state_pieces.MOST_WRITERS, state_pieces._read_unit = kept, read_unit
    found = trajectory_of(trainer)
    trainer.engine.close()
    return sorted({name for name in names if name.startswith("rank_")}), found


def resumed(world: int, path: Path, **arguments: Any) -> list[list[str]]:
    """What each rank opens; that the numbers are those of the run that was never stopped is checked."""
    whole = pool(world).run(partial(train, str(path / "whole"), **arguments))
    checkpoint = str((path / "whole" / "checkpoint-2").resolve())
    arguments.pop("as_before", None)
    found = pool(world).run(partial(train, str(path / "resumed"), checkpoint, **arguments))
    for (_, one), (_, other) in zip(found, whole, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(one.weights[name], weight) for name, weight in other.weights.items())
    return [names for names, _ in found]


def own(*ranks: int, frozen: tuple[int, ...] = ()) -> list[str]:
    """Files of these ranks, and those with the frozen weights that ``frozen`` wrote."""
    files = [f"rank_{rank:05d}.safetensors" for rank in ranks]
    return sorted(files + [f"rank_{rank:05d}.frozen.safetensors" for rank in frozen])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_in_the_same_layout_a_rank_opens_its_own_file_only(world: int, stage: int, tmp_path: Path) -> None:
    assert resumed(world, tmp_path, zero_stage=stage) == [own(rank) for rank in range(world)]


def test_also_where_it_holds_nothing_but_padding_of_a_parameter(tmp_path: Path) -> None:
    found = resumed(4, tmp_path, narrow=True, zero_stage=3)
    assert found == [own(rank, frozen=(rank,)) for rank in range(4)]


def test_a_checkpoint_without_empty_pieces_is_gone_on_from(tmp_path: Path) -> None:
    """As they were written before: the rank with padding only has to look into another file."""
    found = resumed(4, tmp_path, narrow=True, zero_stage=3, as_before=True)
    assert found == [own(rank, frozen=(rank,)) for rank in range(3)] + [own(0, 3, frozen=(0, 3))]


def test_what_all_ranks_hold_is_read_from_a_few(tmp_path: Path) -> None:
    """ZeRO 0, and frozen weights up to ZeRO 2, which every rank needs whole."""
    found = resumed(4, tmp_path / "0", zero_stage=0, writers=2)
    assert found == [own(0, 2), own(0, 1, 2), own(0, 2), own(0, 2, 3)]
    found = resumed(4, tmp_path / "2", narrow=True, zero_stage=2, writers=2)
    assert found == [own(*ranks, frozen=(0, 2)) for ranks in ((0,), (0, 1), (2,), (0, 3))]


def test_what_tensor_parallel_ranks_hold_whole_is_read_from_the_first(tmp_path: Path) -> None:
    found = resumed(4, tmp_path, zero_stage=1, tensor_parallel_size=2)
    assert found == [own(0), own(0, 1), own(2), own(2, 3)]


@pytest.mark.parametrize("ranks", [1, 5, 16, 17, 1000, 1024, 4096])
def test_the_writers_of_what_all_hold(ranks: int) -> None:
    writers = writers_of_replicas(ranks)
    assert len(writers) == len(set(writers)) == min(ranks, 16) and 0 <= min(writers) <= max(writers) < ranks


# -- other layouts ----------------------------------------------------------------------------------------------------

SIZES = {"wide": 64 * 37, "norm": 48, "frozen": 640}


def written(directory: Path, files: int) -> dict[str, torch.Tensor]:
    """A checkpoint as ``files`` ranks write it with ZeRO-3; the whole tensors."""
    whole = {name: torch.randn(size) for name, size in SIZES.items()}
    for rank in range(files):
        pieces = []
        for name, tensor in whole.items():
            size = -(-len(tensor) // files)
            place = Place.whole(tensor.shape).run(min(len(tensor), rank * size), min(len(tensor), (rank + 1) * size))
            for kind in (WEIGHT,) if name == "frozen" else (MASTER, "exp_avg"):
                pieces.append(Piece(name, kind, place, tensor[place.start : place.stop] * (kind != "exp_avg" or 2)))
        stream = io.BytesIO()
        scalars = {name: {"step": 3.0} for name in whole if name != "frozen"}
        write_pieces_file(stream, pieces, scalars)  # type: ignore[arg-type]
        (directory / own(rank)[0]).write_bytes(stream.getvalue())
    return whole


def mapped(directory: Path, names: Sequence[str], ranks: int) -> tuple[list[dict[str, PiecesFile]], maps.PieceMap]:
    """What each of ``ranks`` opens to make the map, and the map that all of them get."""
    opened_by: list[dict[str, PiecesFile]] = [{} for _ in range(ranks)]
    said: list[Any] = []
    for rank in range(ranks):

        def read(name: str, rank: int = rank) -> PiecesFile:
            return opened_by[rank].setdefault(name, PiecesFile(directory / name))

        def note(value: Any) -> list[Any]:
            said.append(value)
            return []

        map_together(names, slice(rank, None, ranks), None, read, note)
    return opened_by, map_together(names, slice(0), None, PiecesFile, lambda value: said)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 16, 63])
def test_in_another_layout_a_rank_opens_what_it_needs(ranks: int, tmp_path: Path) -> None:
    files = 64
    whole, names = written(tmp_path, files), own(*range(files))
    opened_by, piece_map = mapped(tmp_path, names, ranks)
    assert sum(map(len, opened_by)) == files  # every header is read once, by all ranks together
    for rank in range(ranks):
        source = PiecesSource([tmp_path / name for name in names], piece_map=piece_map)
        with opened(tmp_path) as seen:
            for name, tensor in whole.items():
                place = Place.whole(tensor.shape).share(rank, ranks)
                for kind in source.kinds(name):
                    target = torch.zeros(len(place))
                    source.fill(name, kind, place, target)
                    assert torch.equal(target, tensor[place.start : place.stop] * (kind != "exp_avg" or 2))
                assert source.scalars(name) == ({} if name == "frozen" else {"step": 3.0})
        assert len({name for name in seen if name}) <= min(files, 2 * (files // ranks + 2))


def test_a_map_of_other_slices_and_shapes(tmp_path: Path) -> None:
    """Tensor parallelism of 4 ranks, read by 2: rows and columns that are cut."""
    whole = torch.arange(8 * 12.0).view(8, 12)
    for rank in range(4):
        bands = ((3 * rank, 3),)
        place = Place((8, 12), 0, 24, 1, bands)
        piece = Piece("w", MASTER, place, whole[:, 3 * rank : 3 * rank + 3].reshape(-1))
        stream = io.BytesIO()
        write_pieces_file(stream, [piece], {})
        (tmp_path / own(rank)[0]).write_bytes(stream.getvalue())
    names = own(0, 1, 2, 3)
    _, piece_map = mapped(tmp_path, names, 2)
    assert sorted(piece_map.files("w", MASTER, Place((8, 12), 0, 48, 1, ((0, 6),)))) == names[:2]
    assert sorted(piece_map.files("w", MASTER, Place((8, 12), 0, 12))) == names  # the first row
    assert piece_map.files("w", MASTER, Place((8, 12), 0, 3)) == names[:1]
    assert piece_map.files("w", MASTER, Place((4, 4), 0, 16)) == names[:1]  # which says that the shape is another one
    assert piece_map.files("v", MASTER, Place((4, 4), 0, 16)) == []

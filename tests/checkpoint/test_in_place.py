"""Pieces of whatever layout, written in place, are the file that one process writes of the whole tensors."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer.checkpoint.background.arena import Arena
from ds_trainer.checkpoint.background.snapshot import Snapshot
from ds_trainer.checkpoint.pieces import in_place
from ds_trainer.checkpoint.pieces.content import PiecesContent
from ds_trainer.checkpoint.pieces.model_plan import ModelPlan, StoredTensor
from ds_trainer.checkpoint.pieces.source import PiecesSource
from ds_trainer.checkpoint.protocol.contents import Held, WritesShared
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.files import checksum
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.checkpoint.protocol.saving import CheckpointSave
from ds_trainer.checkpoint.protocol.sharing import Messages, Sharing
from ds_trainer.checkpoint.weights.planning import NoModelFiles, plan_model
from ds_trainer.engine.state.pieces import MASTER, Piece
from ds_trainer.parallel.places import Place, copy_common
from tests.support.checkpoints import FACTS, on_ranks

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (16, 12), (8, 16), (4, 8, 6), (3, 5), (64,), (0,), (2, 4, 4, 2)]


class Parameters(nn.Module):
    """Parameters of all shapes, of one type, and an integer buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
        self.to(dtype)


def slices(shape: tuple[int, ...], tp: int, choose: random.Random) -> list[Place]:
    """A tensor whole, or cut along one of its dimensions, in one band or in two as a fused weight is."""
    fitting = [dim for dim, size in enumerate(shape) if size and size % (2 * tp) == 0]
    dim = choose.choice([None, *fitting])
    if dim is None:
        return [Place.whole(shape)]
    half, numel = shape[dim] // 2, Place.whole(shape).stop // tp
    if choose.random() < 0.5:
        bands = [((i * 2 * half // tp, 2 * half // tp),) for i in range(tp)]
        return [Place(shape, 0, numel, dim, band) for band in bands]
    width = half // tp
    return [Place(shape, 0, numel, dim, ((i * width, width), (half + i * width, width))) for i in range(tp)]


def masters(whole: dict[str, torch.Tensor], tp: int, dp: int, choose: random.Random) -> list[list[Piece]]:
    """Of every rank its pieces: every element is on one of them."""
    found: list[list[Piece]] = [[] for _ in range(tp * dp)]
    for name, tensor in whole.items():
        for index, cut in enumerate(slices(tuple(tensor.shape), tp, choose)):
            flat = torch.empty(len(cut), dtype=tensor.dtype)
            copy_common(flat, cut, tensor.reshape(-1), Place.whole(tensor.shape))
            edges = [0, *sorted(choose.randrange(len(flat) + 1) for _ in range(dp - 1)), len(flat)]
            for part, (first, last) in enumerate(pairwise(edges)):
                found[part * tp + index].append(Piece(name, MASTER, cut.run(first, last), flat[first:last]))
    return found


def written(
    rank: int, messages: Messages, of_ranks: list[list[Piece]], plan: ModelPlan, directory: Path, copied: bool
) -> Path:
    """A checkpoint with what one rank has, in two files, as of states that are swapped out."""

    def stored(piece: Piece) -> StoredTensor | None:
        return plan.stored(piece, False)

    half = len(of_ranks[rank]) // 2
    parts = [of_ranks[rank][:half], of_ranks[rank][half:]]
    contents = [PiecesContent(f"rank_{rank:05d}.{n}.safetensors", part, {}, stored) for n, part in enumerate(parts)]
    files = Snapshot(contents, Arena(block=64, smallest=64)).files() if copied else iter(contents)
    sharing = Sharing(rank, range(len(of_ranks)), 0, 1, ())
    return CheckpointSave(CheckpointDirectory(directory), sharing, 4, FACTS, messages, plan.files).run(files)


@pytest.mark.parametrize("copied", [True, False], ids=["from a copy", "from the engine's own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_layout(dtype: torch.dtype, copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_CHUNK", 16)  # elements: all ways of writing are taken
    monkeypatch.setattr(in_place, "_LONG", 12 * dtype.itemsize)
    choose = random.Random(0)
    for turn in range(20):
        tp, dp = choose.choice([(1, 1), (1, 3), (2, 1), (2, 2), (4, 2)])
        model = Parameters(dtype)
        whole = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        of_ranks, ranks = masters(whole, tp, dp, choose), tp * dp
        plan = plan_model(model, choose.choice([300, 10**9]))
        directory = tmp_path / str(turn)
        directory.mkdir()

        write = partial(written, of_ranks=of_ranks, plan=plan, directory=directory, copied=copied)
        for path in on_ranks(ranks, write):
            assert isinstance(path, Path), path
        found: dict[str, torch.Tensor] = {}
        for file in plan.files:
            found.update(load_file(path / file.name))
            assert Manifest.read(path).files[file.name].crc32 == checksum(path / file.name)
        assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in whole.items()}
        assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in whole.items())
        # And the masters come back, whoever asks, from the model's files too.
        source = PiecesSource(sorted(path.glob("rank_*.safetensors")))
        if dtype == torch.float32:  # no number is written twice
            assert not any(load_file(file) for file in path.glob("rank_*"))
        for pieces in masters(whole, 2, 2, random.Random(turn)):
            for piece in pieces:
                target = torch.empty(len(piece.place))
                if piece.place.dim is None or _same_dim(of_ranks, piece):
                    source.fill(piece.name, MASTER, piece.place, target)
                    assert torch.equal(target, piece.tensor)


def _same_dim(of_ranks: list[list[Piece]], piece: Piece) -> bool:
    """Slices along different dimensions are never those of one model."""
    dims = {other.place.dim for pieces in of_ranks for other in pieces if other.name == piece.name}
    return dims <= {None, piece.place.dim}


def test_what_has_no_model() -> None:
    """A tensor that only the state dict knows cannot be written from pieces."""

    class Extra(nn.Linear):
        def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[arg-type]
            destination[f"{prefix}made"] = torch.zeros(2)

    with pytest.raises(NoModelFiles, match="made: no parameter or buffer"):
        plan_model(Extra(2, 2), 10**9)


def test_small_contents_share_nothing() -> None:
    """Control: what is no piece takes no part."""
    assert not isinstance(Held("x", b""), WritesShared)
    assert isinstance(PiecesContent("x", [], {}), WritesShared)

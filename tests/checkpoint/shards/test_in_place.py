"""Shards of any layout, written in place, give the file that one process writes from the full tensors."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ds_trainer.checkpoint.background.snapshot import Snapshot, StagingBuffer
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile, WritesSharedFiles
from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave
from ds_trainer.checkpoint.protocol.file_records import checksum
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from ds_trainer.checkpoint.shards import shard_content
from ds_trainer.checkpoint.shards.model_plan import ModelPlan, TensorLocation
from ds_trainer.checkpoint.shards.shard_content import ShardContent
from ds_trainer.checkpoint.shards.shard_source import ShardSource
from ds_trainer.checkpoint.weights.model_saving import NoModelFiles, plan_model_files
from ds_trainer.engine.state.state_shards import MASTER, StateShard
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from tests.support.checkpoints import METADATA, on_ranks

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (16, 12), (8, 16), (4, 8, 6), (3, 5), (64,), (0,), (2, 4, 4, 2)]


class Parameters(nn.Module):
    """Parameters of all shapes and one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
        self.to(dtype)


def slices(shape: tuple[int, ...], tp: int, choose: random.Random) -> list[ShardSlice]:
    """A tensor whole, or partitioned along one dimension, in one band or, as a fused weight, in two."""
    fitting = [dim for dim, size in enumerate(shape) if size and size % (2 * tp) == 0]
    dim = choose.choice([None, *fitting])
    if dim is None:
        return [ShardSlice.whole(shape)]
    half, numel = shape[dim] // 2, ShardSlice.whole(shape).stop // tp
    if choose.random() < 0.5:
        bands = [((i * 2 * half // tp, 2 * half // tp),) for i in range(tp)]
        return [ShardSlice(shape, 0, numel, dim, band) for band in bands]
    width = half // tp
    return [ShardSlice(shape, 0, numel, dim, ((i * width, width), (half + i * width, width))) for i in range(tp)]


def masters(full: dict[str, torch.Tensor], tp: int, dp: int, choose: random.Random) -> list[list[StateShard]]:
    """The shards of every rank; every element is on one rank."""
    by_rank: list[list[StateShard]] = [[] for _ in range(tp * dp)]
    for name, tensor in full.items():
        for index, slice_ in enumerate(slices(tuple(tensor.shape), tp, choose)):
            flat = torch.empty(len(slice_), dtype=tensor.dtype)
            copy_common(flat, slice_, tensor.reshape(-1), ShardSlice.whole(tensor.shape))
            edges = [0, *sorted(choose.randrange(len(flat) + 1) for _ in range(dp - 1)), len(flat)]
            for part, (first, last) in enumerate(pairwise(edges)):
                shard = StateShard(name, MASTER, slice_.run(first, last), flat[first:last])
                by_rank[part * tp + index].append(shard)
    return by_rank


def written(
    rank: int,
    communicator: Communicator,
    of_ranks: list[list[StateShard]],
    plan: ModelPlan,
    directory: Path,
    copied: bool,
) -> Path:
    """A checkpoint with one rank's shards in two files, as for states that are swapped out."""

    def locate(shard: StateShard) -> TensorLocation | None:
        return plan.stored(shard, False)

    half = len(of_ranks[rank]) // 2
    halves = [of_ranks[rank][:half], of_ranks[rank][half:]]
    contents = [ShardContent(f"rank_{rank:05d}.{n}.safetensors", shards, {}, locate) for n, shards in enumerate(halves)]
    files = Snapshot(contents, StagingBuffer(max_block=64, min_block=64)).files() if copied else iter(contents)
    writer_group = WriterGroup(rank, range(len(of_ranks)), 0, 1, ())
    return CheckpointSave(CheckpointDirectory(directory), writer_group, 4, METADATA, communicator, plan.files).run(
        files
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("copied", [True, False], ids=["from a copy", "from the engine's own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_of_any_layout_are_written_in_place(
    dtype: torch.dtype, copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_content, "_CHUNK", 16)  # elements: takes all code paths
    monkeypatch.setattr(shard_content, "_LONG_ROW", 12 * dtype.itemsize)
    choose = random.Random(0)
    for _ in range(20):
        tp, dp = choose.choice([(1, 1), (1, 3), (2, 1), (2, 2), (4, 2)])
        model = Parameters(dtype)
        full = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        of_ranks, ranks = masters(full, tp, dp, choose), tp * dp
        plan = plan_model_files(model, choose.choice([300, 10**9]))
        directory = tmp_path / str(_)
        directory.mkdir()

        write = partial(written, of_ranks=of_ranks, plan=plan, directory=directory, copied=copied)
        for path in on_ranks(ranks, write):
            assert isinstance(path, Path), path
        saved: dict[str, torch.Tensor] = {}
        for file in plan.files:
            saved.update(load_file(path / file.name))
            assert Manifest.read(path).files[file.name].crc32 == checksum(path / file.name)
        assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in full.items()}
        assert all(torch.equal(saved[name], tensor.to(dtype)) for name, tensor in full.items())
        # Any layout can read the masters back, also from the model's files.
        source = ShardSource(sorted(path.glob("rank_*.safetensors")))
        if dtype == torch.float32:  # nothing is written twice
            assert not any(load_file(file) for file in path.glob("rank_*"))
        for shards in masters(full, 2, 2, random.Random(_)):
            for shard in shards:
                target = torch.empty(len(shard.slice))
                if shard.slice.dim is None or _same_dim(of_ranks, shard):
                    source.fill(shard.name, MASTER, shard.slice, target)
                    assert torch.equal(target, shard.tensor)


def _same_dim(of_ranks: list[list[StateShard]], shard: StateShard) -> bool:
    """In one model, a tensor is never partitioned along different dimensions."""
    dims = {other.slice.dim for shards in of_ranks for other in shards if other.name == shard.name}
    return dims <= {None, shard.slice.dim}


def test_models_without_model_files() -> None:
    """A tensor that exists only in the state dict cannot be written from shards."""

    class Extra(nn.Linear):
        def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[arg-type]
            destination[f"{prefix}made"] = torch.zeros(2)

    with pytest.raises(NoModelFiles, match="made: not a parameter or buffer"):
        plan_model_files(Extra(2, 2), 10**9)


def test_small_files_write_no_shared_files() -> None:
    """Control: only shards are written to shared files."""
    assert not isinstance(InMemoryFile("x", b""), WritesSharedFiles)
    assert isinstance(ShardContent("x", [], {}), WritesSharedFiles)

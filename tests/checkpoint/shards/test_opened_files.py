"""Which files a rank opens to resume: its own in the same layout, those that it needs in another one."""

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
from ds_trainer.checkpoint.shards.shard_file import ShardFile, write_shard_file
from ds_trainer.checkpoint.shards.shard_map import ShardMap, build_shard_map
from ds_trainer.checkpoint.shards.shard_source import ShardSource
from ds_trainer.engine.state import state_shards as state_shards
from ds_trainer.engine.state.state_shards import MASTER, WEIGHT, StateShard, replicated_writers
from ds_trainer.parallel.shard_slices import ShardSlice
from tests.support.file_access import opened
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.support.runs import compatibility_of


class Narrow(nn.Module):
    """Its only bias has fewer elements than there are ranks, so some hold only padding. It has a frozen weight."""

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
    without_empty: bool = False,
    **arguments: Any,
) -> tuple[list[str], Any]:
    """The shard files that this rank opened to resume, and the result of the run."""
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
    most_writers, read_unit = state_shards.MAX_WRITERS, state_shards._read_partition
    state_shards.MAX_WRITERS = writers
    if without_empty:  # as older checkpoints, which have no empty shards

        def without(engine: Any, unit: Any, numbers: Any, into: Any) -> None:
            read_unit(engine, unit, numbers, into)
            into.tensors[:] = [shard for shard in into.tensors if len(shard.slice)]

        state_shards._read_partition = without
    try:
        with opened(Path(resume or output_dir).resolve()) as names:
            trainer.train(resume_from_checkpoint=resume)
    finally:
        state_shards.MAX_WRITERS, state_shards._read_partition = most_writers, read_unit
    result = compatibility_of(trainer)
    trainer.engine.close()
    return sorted({name for name in names if name.startswith("rank_")}), result


def resumed(world: int, path: Path, **arguments: Any) -> list[list[str]]:
    """What each rank opens; checks that the results match those of the uninterrupted run."""
    uninterrupted = pool(world).run(partial(train, str(path / "whole"), **arguments))
    checkpoint = str((path / "whole" / "checkpoint-2").resolve())
    arguments.pop("without_empty", None)
    opened_files = pool(world).run(partial(train, str(path / "resumed"), checkpoint, **arguments))
    for (_, one), (_, other) in zip(opened_files, uninterrupted, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(one.weights[name], weight) for name, weight in other.weights.items())
    return [names for names, _ in opened_files]


def shard_files(*ranks: int, frozen: tuple[int, ...] = ()) -> list[str]:
    """Shard files of these ranks, and the files of frozen weights of the ranks ``frozen``."""
    files = [f"rank_{rank:05d}.safetensors" for rank in ranks]
    return sorted(files + [f"rank_{rank:05d}.frozen.safetensors" for rank in frozen])


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_opens_only_its_own_file_in_the_same_layout(world: int, stage: int, tmp_path: Path) -> None:
    assert resumed(world, tmp_path, zero_stage=stage) == [shard_files(rank) for rank in range(world)]


def test_a_rank_with_only_padding_opens_its_own_file(tmp_path: Path) -> None:
    opened_files = resumed(4, tmp_path, narrow=True, zero_stage=3)
    assert opened_files == [shard_files(rank, frozen=(rank,)) for rank in range(4)]


def test_a_checkpoint_without_empty_shards_can_be_resumed(tmp_path: Path) -> None:
    """In older checkpoints, the rank with only padding searches another file."""
    opened_files = resumed(4, tmp_path, narrow=True, zero_stage=3, without_empty=True)
    assert opened_files == [shard_files(rank, frozen=(rank,)) for rank in range(3)] + [shard_files(0, 3, frozen=(0, 3))]


def test_replicated_state_is_read_from_a_few_files(tmp_path: Path) -> None:
    """ZeRO 0, and frozen weights up to ZeRO 2, which every rank needs completely."""
    opened_files = resumed(4, tmp_path / "0", zero_stage=0, writers=2)
    assert opened_files == [shard_files(0, 2), shard_files(0, 1, 2), shard_files(0, 2), shard_files(0, 2, 3)]
    opened_files = resumed(4, tmp_path / "2", narrow=True, zero_stage=2, writers=2)
    assert opened_files == [shard_files(*ranks, frozen=(0, 2)) for ranks in ((0,), (0, 1), (2,), (0, 3))]


def test_unpartitioned_tensors_are_read_from_the_first_tensor_parallel_rank(tmp_path: Path) -> None:
    opened_files = resumed(4, tmp_path, zero_stage=1, tensor_parallel_size=2)
    assert opened_files == [shard_files(0), shard_files(0, 1), shard_files(2), shard_files(2, 3)]


@pytest.mark.parametrize("ranks", [1, 5, 16, 17, 1000, 1024, 4096])
def test_writers_of_replicated_state(ranks: int) -> None:
    writers = replicated_writers(ranks)
    assert len(writers) == len(set(writers)) == min(ranks, 16) and 0 <= min(writers) <= max(writers) < ranks


# -- other layouts ----------------------------------------------------------------------------------------------------

SIZES = {"wide": 64 * 37, "norm": 48, "frozen": 640}


def written(directory: Path, files: int) -> dict[str, torch.Tensor]:
    """Writes a checkpoint as ``files`` ranks do with ZeRO-3; returns the whole tensors."""
    full = {name: torch.randn(size) for name, size in SIZES.items()}
    for rank in range(files):
        shards = []
        for name, tensor in full.items():
            size = -(-len(tensor) // files)
            slice_ = ShardSlice.whole(tensor.shape).run(
                min(len(tensor), rank * size), min(len(tensor), (rank + 1) * size)
            )
            for kind in (WEIGHT,) if name == "frozen" else (MASTER, "exp_avg"):
                shards.append(
                    StateShard(name, kind, slice_, tensor[slice_.start : slice_.stop] * (kind != "exp_avg" or 2))
                )
        stream = io.BytesIO()
        scalars = {name: {"step": 3.0} for name in full if name != "frozen"}
        write_shard_file(stream, shards, scalars)  # type: ignore[arg-type]
        (directory / shard_files(rank)[0]).write_bytes(stream.getvalue())
    return full


def mapped(directory: Path, names: Sequence[str], ranks: int) -> tuple[list[dict[str, ShardFile]], ShardMap]:
    """What each of ``ranks`` opens to build the map, and the map that all of them get."""
    opened_by: list[dict[str, ShardFile]] = [{} for _ in range(ranks)]
    values: list[Any] = []
    for rank in range(ranks):

        def read(name: str, rank: int = rank) -> ShardFile:
            return opened_by[rank].setdefault(name, ShardFile(directory / name))

        def note(value: Any) -> list[Any]:
            values.append(value)
            return []

        build_shard_map(names, slice(rank, None, ranks), None, read, note)
    return opened_by, build_shard_map(names, slice(0), None, ShardFile, lambda value: values)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 16, 63])
def test_a_rank_opens_what_it_needs_in_another_layout(ranks: int, tmp_path: Path) -> None:
    files = 64
    full, names = written(tmp_path, files), shard_files(*range(files))
    opened_by, shard_map = mapped(tmp_path, names, ranks)
    assert sum(map(len, opened_by)) == files  # every header is read once
    for rank in range(ranks):
        source = ShardSource([tmp_path / name for name in names], shard_map=shard_map)
        with opened(tmp_path) as file_names:
            for name, tensor in full.items():
                wanted = ShardSlice.whole(tensor.shape).part(rank, ranks)
                for kind in source.kinds(name):
                    target = torch.zeros(len(wanted))
                    source.fill(name, kind, wanted, target)
                    assert torch.equal(target, tensor[wanted.start : wanted.stop] * (kind != "exp_avg" or 2))
                assert source.scalars(name) == ({} if name == "frozen" else {"step": 3.0})
        assert len({name for name in file_names if name}) <= min(files, 2 * (files // ranks + 2))


def test_a_shard_map_finds_other_slices_and_shapes(tmp_path: Path) -> None:
    """Written with 4 tensor-parallel ranks, read with 2: partitioned rows and columns."""
    full = torch.arange(8 * 12.0).view(8, 12)
    for rank in range(4):
        bands = ((3 * rank, 3),)
        slice_ = ShardSlice((8, 12), 0, 24, 1, bands)
        shard = StateShard("w", MASTER, slice_, full[:, 3 * rank : 3 * rank + 3].reshape(-1))
        stream = io.BytesIO()
        write_shard_file(stream, [shard], {})
        (tmp_path / shard_files(rank)[0]).write_bytes(stream.getvalue())
    names = shard_files(0, 1, 2, 3)
    _, shard_map = mapped(tmp_path, names, 2)
    assert sorted(shard_map.files("w", MASTER, ShardSlice((8, 12), 0, 48, 1, ((0, 6),)))) == names[:2]
    assert sorted(shard_map.files("w", MASTER, ShardSlice((8, 12), 0, 12))) == names  # the first row
    assert shard_map.files("w", MASTER, ShardSlice((8, 12), 0, 3)) == names[:1]
    assert shard_map.files("w", MASTER, ShardSlice((4, 4), 0, 16)) == names[:1]  # a file that shows the other shape
    assert shard_map.files("v", MASTER, ShardSlice((4, 4), 0, 16)) == []

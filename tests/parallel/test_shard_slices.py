"""Shards of tensors: the common elements of two, compared with plain indexing."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ds_trainer.parallel.shard_slices import ShardSlice, copy_common

SHAPES = [(7,), (6, 5), (4, 6, 3), (1, 9), (12, 1), (3, 8, 2, 2)]


def slices(shape: tuple[int, ...]) -> list[ShardSlice]:
    """The full tensor, halves, uneven and fused partitions along each dimension, an empty one."""
    found = [ShardSlice.whole(shape)]
    for dim, size in enumerate(shape):
        half = size // 2
        boundaries = [((0, half),), ((half, size - half),), ((0, 0),)]
        if size > 1:
            boundaries += [((size - 1, 1), (0, half)), ((0, 1), (max(1, half), size - max(1, half)))]
        for bands in boundaries:
            shard_slice = ShardSlice(shape, 0, 0, dim, bands)
            found.append(shard_slice.run(0, shard_slice.slice_numel))
    return found


def indices(shard_slice: ShardSlice) -> torch.Tensor:
    """Which elements of the full tensor a slice holds, by plain indexing."""
    full = torch.arange(torch.Size(shard_slice.shape).numel()).view(shard_slice.shape)
    if shard_slice.dim is not None:
        kept = [i for first, length in shard_slice.bands for i in range(first, first + length)]
        full = full.index_select(shard_slice.dim, torch.tensor(kept, dtype=torch.int64))
    return full.flatten()[shard_slice.start : shard_slice.stop]


def runs(shard_slice: ShardSlice, generator: random.Random) -> list[ShardSlice]:
    numel = shard_slice.slice_numel
    boundaries = [tuple(sorted((generator.randint(0, numel), generator.randint(0, numel)))) for _ in range(3)]
    return [shard_slice, *(shard_slice.run(*bounds) for bounds in boundaries)]


@pytest.mark.parametrize("shape", SHAPES)
def test_common_elements_of_two_slices_are_copied(shape: tuple[int, ...]) -> None:
    generator = random.Random(0)
    runs_of_slices = [run for shard_slice in slices(shape) for run in runs(shard_slice, generator)]
    checked = 0
    for wanted, given in itertools.product(runs_of_slices, runs_of_slices):
        if None not in (wanted.dim, given.dim) and wanted.dim != given.dim:
            with pytest.raises(ValueError, match="different dimensions"):
                list(wanted.common(given))
            continue
        source, target = indices(given), torch.full((len(wanted),), -1)
        copied = copy_common(target, wanted, source, given)
        held = set(source.tolist())
        expected = torch.tensor([i if i in held else -1 for i in indices(wanted).tolist()], dtype=torch.int64)
        assert torch.equal(target, expected), (wanted, given)
        assert copied == int((expected >= 0).sum())
        checked += 1
    assert checked > 100


def test_a_run_of_a_view_has_offsets_from_the_view() -> None:
    """Targets are views into an engine's flat tensors: offsets count from where the view begins."""
    shard_slice = ShardSlice.whole((4, 3))
    full = torch.arange(12.0)
    buffer = torch.zeros(20)
    copy_common(buffer[5:11], shard_slice.run(2, 8), full, shard_slice)
    assert buffer.tolist() == [0.0] * 5 + [2.0, 3.0, 4.0, 5.0, 6.0, 7.0] + [0.0] * 9


@pytest.mark.parametrize(("numel", "count"), [(10, 3), (2, 4), (0, 2), (8, 1)])
def test_shards_cover_the_run_once(numel: int, count: int) -> None:
    shard_slice = ShardSlice((numel + 5,), 3, 3 + numel)
    shards = [shard_slice.part(index, count) for index in range(count)]
    assert [i for shard in shards for i in range(shard.start, shard.stop)] == list(range(3, 3 + numel))


def test_slices_of_different_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) and \(4,\)"):
        list(ShardSlice.whole((3,)).common(ShardSlice.whole((4,))))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_slice_converts_to_plain_data_and_back(shape: tuple[int, ...]) -> None:
    for shard_slice in slices(shape):
        assert ShardSlice.from_json(shard_slice.to_json()) == shard_slice

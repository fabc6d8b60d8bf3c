"""Which elements of a whole tensor a run of a slice holds, and where: against copying them."""

from __future__ import annotations

import pytest
import torch

from ds_trainer.parallel.shard_slices import ShardSlice, copy_common

SHAPE = (6, 4, 3)
SLICES = [
    ShardSlice.whole(SHAPE),
    ShardSlice(SHAPE, 0, 36, 0, ((1, 2), (5, 1))),
    ShardSlice(SHAPE, 0, 54, 1, ((0, 1), (2, 2))),
    ShardSlice(SHAPE, 0, 24, 2, ((1, 1),)),
]


@pytest.mark.parametrize("shard_slice", SLICES, ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, 17), (5, 6), (8, 8)])
def test_located_elements_are_where_copying_puts_them(shard_slice: ShardSlice, start: int, stop: int | None) -> None:
    run = shard_slice.run(start, shard_slice.slice_numel if stop is None else stop)
    numbers = torch.arange(72)
    held = torch.full((len(run),), -1)
    assert copy_common(held, run, numbers, ShardSlice.whole(SHAPE)) == len(run)
    which, offsets = run.locate(numbers)
    assert sorted(which.tolist()) == sorted(held.tolist())
    assert torch.equal(held[offsets], which)
    some = torch.tensor([70, 3, 41, 3])
    which, offsets = run.locate(some)
    assert torch.equal(held[offsets], some[which])
    assert len(which) == int(torch.isin(some, held).sum())

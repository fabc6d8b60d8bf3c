"""The order of samples, sharding, dummy batches and starting in the middle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.data.batch_structure import DummyBatch
from ds_trainer.data.loader import PlannedLoader
from ds_trainer.data.order import epoch_order
from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from tests.support.orders import in_full


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(rows)}


def loader(samples: int, dp: int, rank: int, micro: int = 2, workers: int = 0) -> PlannedLoader:
    sampler = DistributedBatchSampler(BatchPlan(ParallelLayout(dp), micro), samples, rank, seed=5)
    return PlannedLoader(list(range(samples)), sampler, collate, workers)  # type: ignore[arg-type]


def test_the_order_is_that_of_accelerate() -> None:
    from accelerate.data_loader import SeedableRandomSampler

    reference = SeedableRandomSampler(range(19), generator=torch.Generator(), data_seed=7)
    for epoch in range(3):
        reference.set_epoch(epoch)
        assert in_full(epoch_order(19, 7, epoch, shuffle=True)) == list(reference)
    assert in_full(epoch_order(4, 7, 0, shuffle=False)) == [0, 1, 2, 3]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_replicas_see_every_sample_once_and_have_equally_many_batches(n: int, dp: int, micro: int, epoch: int) -> None:
    seen: list[int] = []
    lengths = set()
    for rank in range(dp):
        one = loader(n, dp, rank, micro)
        one.start(epoch)
        batches = list(one)
        lengths.add(len(batches))
        assert len(batches) == len(one)
        seen += [x for batch in batches if not isinstance(batch, DummyBatch) for x in batch["x"].tolist()]
    assert sorted(seen) == list(range(n))
    assert len(lengths) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_start_at_any_micro_step(workers: int) -> None:
    one = loader(21, 2, 1, workers=workers)
    one.start(3)
    full = [batch["x"].tolist() for batch in one]
    one.start(3, first_sample=4 * 4)
    assert [batch["x"].tolist() for batch in one] == full[4:]
    one.start(4)
    assert [batch["x"].tolist() for batch in one] != full


def test_loading_does_not_change_the_global_random_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert list(loader(9, 1, 0))
    assert torch.equal(torch.get_rng_state(), before)

"""Random draws depend on seed, epoch, replica and position; what a pickled sampler includes."""

from __future__ import annotations

import pickle

from ds_trainer.data.sampler import DistributedBatchSampler
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout


def sampler(
    rank: int = 0, seed: int = 1, epoch: int = 0, first_sample: int = 0, samples: int = 40
) -> DistributedBatchSampler:
    made = DistributedBatchSampler(BatchPlan(ParallelLayout(2), 2), samples, rank, seed=seed)
    made.epoch, made.first_sample = epoch, first_sample
    return made


def test_every_micro_batch_draws_different_numbers() -> None:
    """Replicas whose samples are augmented alike see half of the augmentations."""
    seeds = {
        sampler(rank, seed, epoch).seeds(range(micro_step, micro_step + 1))[0]
        for rank in (0, 1)
        for seed in (1, 2)
        for epoch in (0, 1)
        for micro_step in range(5)
    }
    assert len(seeds) == 2 * 2 * 2 * 5 and all(0 <= seed < 2**32 for seed in seeds)


def test_draws_at_a_position_do_not_depend_on_where_reading_started() -> None:
    full, rest = sampler(), sampler(first_sample=12)
    assert full.seeds(range(3, 6)) == rest.seeds(range(3))
    assert list(full)[3:] == list(rest)
    assert [batch.seed for batch in rest] == rest.seeds(range(7))  # type: ignore[attr-defined]


def test_every_epoch_has_its_own_order() -> None:
    one = sampler()
    first = list(one)
    one.epoch = 1
    assert list(one) != first
    one.epoch = 0
    assert list(one) == first


def test_replicas_share_a_global_batch() -> None:
    ranks = [list(sampler(rank, samples=11)) for rank in (0, 1)]
    found = [position for batches in zip(*ranks, strict=True) for batch in batches for position in batch]
    assert sorted(found) == list(range(11))
    tail = [sampler(rank, samples=9, first_sample=8) for rank in (0, 1)]
    assert [one.is_dummy(0) for one in tail] in ([True, False], [False, True])
    assert tail[0].rest == 1 and [len(batch) for one in tail for batch in one] == [1, 1]


def test_a_pickled_sampler_does_not_include_the_order() -> None:
    """Loading processes get a copy of the sampler: an order of a million samples would travel to each."""
    one = sampler(samples=100_000)
    empty = len(pickle.dumps(one))
    list(one.positions(0, 10))
    assert len(pickle.dumps(one)) == empty < 10_000
    assert pickle.loads(pickle.dumps(one)).positions(0, 10) == one.positions(0, 10)

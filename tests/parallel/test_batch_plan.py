"""BatchPlan: every sample exactly once, global batches the same for every layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.errors import ConfigError

small = st.integers(1, 6)
plans = st.builds(
    lambda dp, tp, sp, micro, accumulation, drop: BatchPlan(
        ParallelLayout(dp * tp * sp, tp=tp, sp=sp), micro, accumulation, drop
    ),
    small,
    st.integers(1, 3),
    st.integers(1, 3),
    small,
    small,
    st.booleans(),
)


def positions_of_step(plan: BatchPlan, step: int, samples: int) -> list[int]:
    micro_steps = plan.micro_steps(samples)
    positions: list[int] = []
    for index in range(min(plan.accumulation, micro_steps - step * plan.accumulation)):
        for dp_rank in range(plan.layout.dp):
            positions += plan.rank_samples(step * plan.accumulation + index, dp_rank, samples)
    return positions


@given(plans, st.integers(0, 200))
def test_steps_are_consecutive_runs_that_cover_the_epoch_once(plan: BatchPlan, samples: int) -> None:
    positions = [p for step in range(plan.steps(samples)) for p in positions_of_step(plan, step, samples)]
    assert positions == list(range(plan.samples_used(samples)))
    assert (
        plan.samples_used(samples) > samples - plan.samples_per_micro_step
        if plan.drop_last
        else len(positions) == samples
    )


@given(plans, st.integers(1, 200))
def test_no_replica_exceeds_its_micro_batch_and_sizes_are_even(plan: BatchPlan, samples: int) -> None:
    for index in range(plan.micro_steps(samples)):
        sizes = [len(plan.rank_samples(index, dp_rank, samples)) for dp_rank in range(plan.layout.dp)]
        assert max(sizes) <= plan.micro_batch
        assert max(sizes) - min(sizes) <= 1


@given(small, small, st.integers(1, 100))
def test_whole_batches_are_those_of_one_replica(replicas: int, micro: int, samples: int) -> None:
    plan = BatchPlan(ParallelLayout(replicas), micro, whole_batches=True)
    alone = BatchPlan(ParallelLayout(1), micro)
    held = [plan.rank_samples(i, rank, samples) for i in range(plan.micro_steps(samples)) for rank in range(replicas)]
    wanted = [alone.rank_samples(index, 0, samples) for index in range(alone.micro_steps(samples))]
    assert [one for one in held if one] == wanted


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 100))
def test_global_batches_do_not_depend_on_the_layout(micro: int, factor: int, samples: int) -> None:
    one_process = BatchPlan(ParallelLayout(1), micro * factor * 4, 1)
    sharded = BatchPlan(ParallelLayout(8, tp=2), micro, factor)
    assert one_process.global_batch_size == sharded.global_batch_size
    assert one_process.steps(samples) == sharded.steps(samples)
    for step in range(sharded.steps(samples)):
        assert positions_of_step(sharded, step, samples) == positions_of_step(one_process, step, samples)


def test_product_counts_replicas_not_ranks() -> None:
    plan = BatchPlan(ParallelLayout(8, tp=2), micro_batch=4, accumulation=2)
    assert plan.global_batch_size == 32
    assert plan.describe() == "32 = 4 per device x 2 accumulation x 4 data parallel"


def test_invalid_sizes_raise_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        BatchPlan(ParallelLayout(1), 0, -2)
    assert len(error.value.problems) == 2

"""ParallelLayout as arithmetic: a box of ranks, property-tested."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.parallel.layout import AXES, ParallelLayout, nearest_sizes
from ds_trainer.utils.errors import ConfigError

sizes = st.integers(1, 5)
layouts = st.builds(lambda dp, tp, cp, sp: ParallelLayout(dp * tp * cp * sp, tp, cp, sp), sizes, sizes, sizes, sizes)
axis_sets = st.lists(st.sampled_from(AXES), unique=True)


@given(layouts)
def test_ranks_and_coordinates_are_a_bijection(layout: ParallelLayout) -> None:
    coordinates = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(coordinates)) == layout.world_size
    assert [layout.rank_at(*place) for place in coordinates] == list(range(layout.world_size))


@given(layouts, axis_sets)
def test_groups_partition_the_world_and_differ_along_their_axes_only(layout: ParallelLayout, axes: list[str]) -> None:
    groups = layout.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    size = 1
    for axis in axes:
        size *= getattr(layout, axis)
    for group in groups:
        assert len(group) == size
        assert group == sorted(group)
        assert layout.group_of(group[-1], axes) == group
        coordinates = [layout.coordinates(rank)._asdict() for rank in group]
        for axis in AXES:
            assert len({place[axis] for place in coordinates}) == (getattr(layout, axis) if axis in axes else 1)


@given(layouts)
def test_axis_sizes_multiply_to_the_world_size(layout: ParallelLayout) -> None:
    assert layout.dp * layout.tp * layout.cp * layout.sp == layout.world_size
    assert layout.seq_data_parallel_size * layout.tp == layout.world_size
    assert layout.replica_size * layout.dp == layout.world_size


def test_tensor_parallel_ranks_are_adjacent_then_sequence_then_context() -> None:
    layout = ParallelLayout(16, tp=2, cp=2, sp=2)
    assert layout.dp == 2
    assert layout.groups(["tp"])[:2] == [[0, 1], [2, 3]]
    assert layout.groups(["sp"])[:2] == [[0, 2], [1, 3]]
    assert layout.groups(["cp"])[0] == [0, 4]
    assert layout.groups(["dp"])[0] == [0, 8]
    assert layout.describe() == "dp 2 x cp 2 x sp 2 x tp 2 = 16 ranks"


def test_an_indivisible_world_size_is_reported_with_sizes_that_fit() -> None:
    message = (
        "8 ranks cannot be divided by tensor 3 x context 1 x sequence 1 = 3. Choose tensor 4 or tensor 2 or tensor 8, "
        "or start 9 ranks."
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        ParallelLayout(8, tp=3)
    with pytest.raises(ConfigError, match=r"Choose tensor 4 x sequence 2 or tensor 2 x sequence 2 or "):
        ParallelLayout(16, tp=3, sp=2)
    with pytest.raises(ConfigError, match=r"1 rank cannot be .* Choose data parallelism alone, or start 2 ranks"):
        ParallelLayout(1, tp=2)


@given(st.integers(1, 32), sizes, sizes, sizes)
def test_the_suggested_sizes_are_the_nearest_that_fit(world: int, tp: int, cp: int, sp: int) -> None:
    found = nearest_sizes(world, tp, cp, sp)
    assert len(set(found)) == len(found) <= 3 and (tp, cp, sp) not in found

    def distance(each: tuple[int, int, int]) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(each, (tp, cp, sp), strict=True))

    assert all(ParallelLayout(world, *each).world_size == world for each in found)  # none is refused
    steps = range(1, world + 1)
    same_axes = (
        [
            each
            for each in itertools.product(steps, steps, steps)
            if world % math.prod(each) == 0
            and each != (tp, cp, sp)
            and not any(size > 1 == wanted for size, wanted in zip(each, (tp, cp, sp), strict=True))
        ]
        if world <= 12
        else []
    )
    if same_axes:
        assert distance(found[0]) == pytest.approx(min(map(distance, same_axes)))


@given(layouts)
def test_each_replica_has_one_leader(layout: ParallelLayout) -> None:
    assert [rank for rank in range(layout.world_size) if layout.is_replica_leader(rank)] == layout.replica_leaders
    assert [layout.coordinates(rank).dp for rank in layout.replica_leaders] == list(range(layout.dp))


def test_every_bad_size_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        ParallelLayout(0, tp=-1, cp=1.5)  # type: ignore[arg-type]
    assert len(error.value.problems) == 3


def test_ranks_and_coordinates_outside_the_layout_are_rejected() -> None:
    layout = ParallelLayout(4, tp=2)
    with pytest.raises(ValueError, match="rank 4 is not in a world of 4"):
        layout.coordinates(4)
    with pytest.raises(ValueError, match=r"tp=2 is not in 0\.\.1"):
        layout.rank_at(tp=2)
    with pytest.raises(ValueError, match="unknown axes"):
        layout.groups(["pp"])

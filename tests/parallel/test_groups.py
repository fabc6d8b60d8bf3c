"""Process groups: each rank gets its own, they carry what they should, and few are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_trainer.parallel import groups as made
from ds_trainer.parallel.groups import ParallelGroups, forget_groups, group_along, parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.utils.collective_limit import collective_limit, set_collective_limit
from tests.support.pool import pool
from tests.support.resuming import make

AXES_OF = made._AXES_OF
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2), (8, 1, 1)]
"""tp, cp, sp on eight ranks."""


@contextmanager
def counted() -> Iterator[list[tuple[str, Any]]]:
    """Calls that make groups: what was called, with which ranks."""
    calls: list[tuple[str, Any]] = []
    new, split = dist.new_group, dist.split_group

    def new_group(ranks: Any = None, **rest: Any) -> Any:
        calls.append(("new", ranks))
        return new(ranks, **rest)

    def split_group(split_ranks: Any = None, **rest: Any) -> Any:
        calls.append(("split", split_ranks))
        return split(split_ranks=split_ranks, **rest)

    dist.new_group, dist.split_group = new_group, split_group
    try:
        yield calls
    finally:
        dist.new_group, dist.split_group = new, split


def group_case(layouts: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """For each layout: the members of each group by torch and by a sum over it, and how many groups were made."""
    forget_groups()
    rank, found = dist.get_rank(), []
    for tp, cp, sp in layouts:
        layout = ParallelLayout(dist.get_world_size(), tp, cp, sp)
        with counted() as calls:
            groups = parallel_groups(layout)
        second = parallel_groups(ParallelLayout(dist.get_world_size(), tp, cp, sp))
        answer: dict[str, Any] = {"made": [ranks for _, ranks in calls], "kept": second is groups}
        for name, axes in [*AXES_OF.items(), ("replica_host", AXES_OF["replica"])]:
            group, own = getattr(groups, name), layout.group_of(rank, axes)
            there = torch.zeros(layout.world_size)
            there[rank] = 1
            dist.all_reduce(there, group=group)
            answer[name] = (
                dist.get_process_group_ranks(group) == own
                and there.nonzero().flatten().tolist() == own
                and dist.get_rank(group) == own.index(rank)
            )
        found.append(answer)
    return found


def test_each_rank_creates_only_its_own_groups() -> None:
    """Groups of eight ranks in seven layouts one after the other: later ones take what earlier ones made."""
    answers = pool(8).run(group_case, LAYOUTS)
    for index, (tp, cp, sp) in enumerate(LAYOUTS):
        layout = ParallelLayout(8, tp, cp, sp)
        for rank, answer in enumerate(answers):
            assert answer[index]["kept"]
            assert all(answer[index][name] for name in [*AXES_OF, "replica_host"]), (layout, rank, answer[index])
            assert all(rank in ranks for ranks in answer[index]["made"])
    # Pure data parallelism: the group of one rank. tp 2: its own and the gradient group; cp 2 and sp 2 have the same.
    assert [len(answers[0][index]["made"]) for index in range(len(LAYOUTS))] == [1, 2, 0, 0, 3, 0, 0]


def sizes_of(groups: ParallelGroups) -> dict[str, int]:
    return {name: getattr(groups, name).size() for name in AXES_OF}


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[Any]:
    """This process is one rank of many, without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        forget_groups()
        dist.destroy_process_group()


# What a rank makes: a group for each axis that differs, one for all of size 1 (experts, too), two in host memory.
COUNTS = {(1, 1, 1): 2, (8, 1, 1): 5, (8, 2, 1): 8, (8, 2, 2): 10, (1, 8, 1): 5}


@pytest.mark.parametrize("world", [64, 1024, 4096])
@pytest.mark.parametrize(("sizes", "count"), COUNTS.items(), ids=str)
def test_the_number_of_groups_does_not_depend_on_the_number_of_ranks(
    world: int, sizes: tuple[int, int, int], count: int
) -> None:
    layout = ParallelLayout(world, *sizes)
    for rank in (0, world - 1):
        with fake_world(world, rank), counted() as calls, gloo_is_fake():
            groups = parallel_groups(layout)
            assert len(calls) == count and all(kind == "new" and rank in ranks for kind, ranks in calls)
            assert sizes_of(groups) == {name: len(layout.group_of(rank, axes)) for name, axes in AXES_OF.items()}
            assert groups.seq_data_parallel is (
                dist.group.WORLD if layout.seq_data_parallel_size == world else groups.seq_data_parallel
            )


@contextmanager
def gloo_is_fake() -> Iterator[None]:
    """Groups in host memory are fake ones too: gloo would look for the other ranks."""
    new = dist.new_group
    dist.new_group = lambda ranks=None, backend=None, **rest: new(ranks, **rest)
    try:
        yield
    finally:
        dist.new_group = new


@contextmanager
def bound_to_a_device(world: Any) -> Iterator[list[list[list[int]]]]:
    """As NCCL with a device: groups are split off, by all ranks at once. Yields the splits."""
    splits: list[list[list[int]]] = []
    real, new = dist.split_group, dist.new_group

    def split_group(split_ranks: Any, timeout: timedelta) -> Any:
        assert timeout == collective_limit()
        splits.append(split_ranks)
        own = next(ranks for ranks in split_ranks if world.rank() in ranks)
        world.bound_device_id = None
        try:
            return new(own, use_local_synchronization=True)
        finally:
            world.bound_device_id = torch.device("cuda", 0)

    def new_group(ranks: Any = None, backend: Any = None, **rest: Any) -> Any:
        # With a device torch would split the communicator of all ranks for a group of the default backend.
        assert backend == "gloo" or (world.bound_device_id is None and len(ranks) == 1)
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            return new(ranks, use_local_synchronization=True)
        finally:
            world.bound_device_id = bound

    class Splits:
        supports_splitting = True

    kept = vars(dist.ProcessGroup)["_get_backend"]  # read as an attribute it would no longer bind to a group
    dist.split_group, dist.new_group = split_group, new_group
    dist.ProcessGroup._get_backend = lambda group, device: (
        Splits() if device.type == "cuda" else kept.__get__(group)(device)
    )
    world.bound_device_id = torch.device("cuda", 0)
    try:
        yield splits
    finally:
        world.bound_device_id = None
        dist.split_group, dist.new_group, dist.ProcessGroup._get_backend = real, new, kept


SPLITS = {
    (1, 1, 1): [],
    (8, 1, 1): ["dp", "tp"],
    (8, 2, 2): ["dp", "cp", "sp", "tp", "sequence", "seq_data_parallel", "replica"],
}


@pytest.mark.parametrize(("sizes", "split"), SPLITS.items(), ids=str)
def test_with_nccl_each_axis_is_one_split_with_the_same_arguments_on_all_ranks(
    sizes: tuple[int, int, int], split: list[str]
) -> None:
    layout = ParallelLayout(1024, *sizes)
    seen = []
    for rank in (0, 1, 1023):
        with fake_world(1024, rank) as world, bound_to_a_device(world) as splits:
            groups = parallel_groups(layout)
            assert sizes_of(groups) == {name: len(layout.group_of(rank, axes)) for name, axes in AXES_OF.items()}
            assert world.bound_device_id == torch.device("cuda", 0)  # as it was before
            seen.append(splits)
    assert seen[0] == seen[1] == seen[2] == [layout.groups(AXES_OF[name]) for name in split]


def test_the_secondary_partition_is_one_group_per_rank() -> None:
    """hpZ: DeepSpeed makes 128 groups at 1,024 ranks. Tensor-parallel ranks hold other parameters: left out."""
    with fake_world(1024, rank=9), counted() as calls:
        assert dist.get_process_group_ranks(group_along(((1, 8),))) == list(range(8, 16))
        assert dist.get_process_group_ranks(group_along(((2, 4),))) == [9, 11, 13, 15]
        assert [len(ranks) for _, ranks in calls] == [8, 4]


# -- time limits -------------------------------------------------------------------------------------------------------


def limits() -> set[timedelta]:
    """The time limits of all groups of this rank."""
    return {group._get_backend(torch.device("cpu")).options._timeout for group in dist.distributed_c10d._world.pg_map}


def limits_in_a_training(output_dir: str, sizes: dict[str, Any]) -> list[set[timedelta]]:
    """The limits before and after ``deepspeed.initialize``, at the end, and after another training with another one."""
    import deepspeed

    forget_groups()
    found = []
    real = deepspeed.initialize

    def initialize(**arguments: Any) -> Any:
        found.append(limits())
        made = real(**arguments)
        found.append(limits())
        return made

    deepspeed.initialize = initialize
    usual = collective_limit()
    try:
        make(output_dir, max_steps=1, ddp_timeout=7200, save_strategy="no", **sizes).train()
    finally:
        deepspeed.initialize = real
    found.append(limits())
    make(output_dir, max_steps=1, ddp_timeout=7300, save_strategy="no", **sizes).train()
    found.append(limits())
    set_collective_limit(usual)
    return found


HPZ = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2, "zero_stage": 1}, {"deepspeed": HPZ}], ids=str)
def test_every_group_has_the_limit_from_its_first_moment(tmp_path: Path, sizes: dict[str, Any]) -> None:
    wanted = [{timedelta(seconds=seconds)} for seconds in (7200, 7200, 7200, 7300)]
    assert pool(4).run(limits_in_a_training, str(tmp_path), sizes) == [wanted] * 4


def groups_of_others(seconds: float) -> tuple[set[timedelta], Any]:
    """Groups that a library creates without a limit, and what torch gives those of NCCL."""
    usual = collective_limit()
    set_collective_limit(timedelta(seconds=seconds))
    try:
        dist.new_group([0, 1])
        dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        return limits(), dist.distributed_c10d._get_default_timeout(dist.Backend(dist.Backend.NCCL))
    finally:
        set_collective_limit(usual)


def test_groups_that_libraries_create_have_the_limit() -> None:
    limit = timedelta(seconds=4321)
    assert pool(2).run(groups_of_others, 4321.0) == [({limit}, limit)] * 2

"""What rank 0 of 1,024 ranks does is what rank 0 of 64 does, except where docs/explanation/scale.md says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import in_a_fork

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # they are scripts, not a package

import scale as benchmark  # noqa: E402

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

PHASES = benchmark.PHASES
Lines = Callable[[str, int], tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Gives the counts of 64 and of 1,024 ranks with a layout and a ZeRO stage."""

    @cache
    def of(layout: str, zero: int) -> tuple[dict[str, Any], dict[str, Any]]:
        few, many = (
            in_a_fork(benchmark.measure, benchmark.Line(ranks, layout, zero), tmp_path_factory.mktemp("scale"))
            for ranks in (64, 1024)
        )
        return few, many

    return of


# Groups that a rank makes: one for each axis that differs, one for all axes of size 1, two in host memory.
LAYOUTS = pytest.mark.parametrize(
    ("layout", "zero", "groups"), [("dp", 1, 2), ("dp", 3, 2), ("tp 8 x cp 2 x sp 2", 1, 9)]
)


# Instead of the others: the same test with ZeRO 3 and with all axes
@pytest.mark.cases("dp-3-2")
@LAYOUTS
def test_groups_files_and_sockets_are_as_many_as_with_few_ranks(
    lines: Lines, layout: str, zero: int, groups: int
) -> None:
    few, many = lines(layout, zero)
    for one in (few, many):
        assert [one[phase]["groups"] for phase in PHASES] == [groups, 0, 0, 0]
        assert not any(one[phase]["groups_of_others"] for phase in PHASES)
    for phase in PHASES:
        # Once more or less: which of two threads opens the folder for both is a matter of time.
        assert abs(many[phase]["files_opened"] - few[phase]["files_opened"]) <= 1, phase
        assert abs(many[phase]["sockets"] - few[phase]["sockets"]) <= 2, phase  # of threads that come and go


# Instead of the others: the same test with ZeRO 3 and with all axes
@pytest.mark.cases("dp-3-2", "tp 8 x cp 2 x sp 2-1-9")
@LAYOUTS
def test_a_step_gathers_nothing_and_opens_nothing(lines: Lines, layout: str, zero: int, groups: int) -> None:
    few, many = (one["step"] for one in lines(layout, zero))
    for step in (few, many):
        assert step["object_gathers"] == step["objects"] == step["files_opened"] == 0
        assert step["store_operations"] <= 20  # of the threads that watch, now and then
    assert abs(many["collectives"] - few["collectives"]) <= 6  # votes follow the clock


# Instead of the others: the same test with ZeRO 3 and with all axes
@pytest.mark.cases("dp-3-2", "tp 8 x cp 2 x sp 2-1-9")
@LAYOUTS
def test_rank_0_receives_little_and_requests_it_at_once(lines: Lines, layout: str, zero: int, groups: int) -> None:
    _, many = lines(layout, zero)
    for phase in PHASES:
        counts = many[phase]
        # Free memory before the first save; a checkpoint that is looked at. With fake ranks the check of sharded
        # sequences fails, and then asks the ranks of a replica for the module.
        fails = phase in ("start", "resume") and "cp 2" in layout
        assert counts["object_gathers"] <= 1 + fails, phase
        assert counts["object_bytes"] <= 100 * 1024, phase
        assert counts["store_operations"] <= 250, phase
        assert counts["store_keys"] <= 40 * 1024, phase  # four stages of a save, windows of slow ranks
    assert many["manifest_bytes"] <= 200 * 1024


def votes_by_hand(ranks: int) -> dict[str, float]:
    """A vote, a barrier and a gather of numbers, which ranks wait for."""
    import torch
    from fake_world import Counts, fake_world

    from ds_trainer.utils import distributed

    counts = Counts()
    with fake_world(ranks, counts):
        distributed.agree(torch.tensor([1]))
        distributed.barrier()
        distributed.gather_numbers(torch.tensor([1]))
    return counts.now()


@pytest.mark.parametrize(("ranks", "rounds"), [(8, 3), (1024, 10), (4096, 12)])
def test_a_vote_is_a_message_for_each_doubling_of_the_ranks(ranks: int, rounds: int) -> None:
    counts = in_a_fork(votes_by_hand, ranks)
    assert counts["messages"] == 3 * rounds
    assert counts.get("collectives", 0) == counts.get("object_gathers", 0) == counts.get("store_operations", 0) == 0


def test_messages_of_a_vote_that_leave_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 machines of 8: as many rounds between machines as with leaders (7), and fewer inside (3 instead of 6)."""
    import torch

    from ds_trainer.utils import distributed

    class Group:
        size = staticmethod(lambda: 1024)

    distances: list[int] = []
    monkeypatch.setattr(
        distributed, "_swap", lambda values, group, distance, limit: distances.append(distance) or values
    )
    distributed._largest_of(torch.zeros(1), Group(), None)  # type: ignore[arg-type]
    leaving = [sum(rank // 8 != (rank + one) % 1024 // 8 for rank in range(1024)) for one in distances]
    assert [one for one, count in zip(distances, leaving, strict=True) if count == 1024] == [
        8,
        16,
        32,
        64,
        128,
        256,
        512,
    ]
    assert sum(leaving) == 8064 and max(leaving) // 128 == 8  # 63 for a machine, 8 of them at a time


def counted_by_hand() -> dict[str, float]:
    """What a program does that does not scale."""
    import torch.distributed as dist
    from fake_world import Counts, fake_world

    counts = Counts()
    with fake_world(64, counts):
        for first in range(0, 64, 8):
            dist.new_group(list(range(first, first + 8)))
        objects: list[Any] = [None] * 64
        dist.all_gather_object(objects, "here")
        for _ in range(3):
            dist.distributed_c10d._get_default_store().set("key", "value")
    assert objects == ["here"] * 64
    return counts.now()


def test_operations_that_do_not_scale_are_counted() -> None:
    counts = in_a_fork(counted_by_hand)
    assert (counts["groups"], counts["groups_of_others"], counts["group_members"]) == (8, 7, 64)
    assert (counts["object_gathers"], counts["objects"], counts["store_operations"]) == (1, 64, 3)


def test_growth_is_reported() -> None:
    ranks: list[dict[str, Any]] = [{"ranks": 64}, {"ranks": 1024}]
    assert benchmark.growth(ranks, [5, 5]) == "no"
    assert benchmark.growth(ranks, [128, 2048]) == "2 a rank"

"""Who is to blame: each rule of the verdict, and that a rank which only waits is never blamed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_trainer
from ds_trainer.monitor.health.stacks import collective_frame, frame_lines, in_debugger, position, script_call
from ds_trainer.monitor.health.verdict import RankReport, joined, judge
from ds_trainer.monitor.health.waits import collective_counts
from tests.support.pool import pool


def report(rank: int, **more: Any) -> RankReport:
    return RankReport(rank, "host", 10 + rank, **more)


WAITS: dict[str, Any] = {"collective": "all_reduce", "collective_seconds": 3.0}


@pytest.mark.parametrize(
    ("reports", "slow"),
    [
        ([WAITS, {}, WAITS], (1,)),
        ([WAITS, {"silent": True}, {}], (1,)),  # who does not answer comes first
        ([WAITS, {**WAITS, "silent": True, "ended": True}, {}], (2,)),
        ([{}, {"ended": True}, {"ended": True}], (0,)),
        # With NCCL nobody waits on the host.
        ([{"counts": {"all": 9}}, {"counts": {"all": 9}}, {"counts": {"all": 8}}], (2,)),
        # Entered in another order: of "tp" rank 0 is behind, though it waits like the other one.
        ([{**WAITS, "counts": {"all": 9, "tp": 3}}, {**WAITS, "counts": {"all": 9, "tp": 4}}], (0,)),
        # Ranks of different groups have different numbers.
        ([{"counts": {"a": 3}}, {"counts": {"a": 3}}, {"counts": {"b": 9}}], ()),
        ([{"step": 7}, {"step": 6}, {"step": 7}], (1,)),
        # A script has called a collective on rank 0 alone; on all ranks; rank 1 does not wait.
        ([{**WAITS, "script": "P.on_log (a.py:3)", "counts": {"all": 8}}, {**WAITS, "counts": {"all": 9}}], ()),
        ([{**WAITS, "script": f"P.on_log (a.py:{n})", "counts": {"all": n}} for n in (8, 9)], (0,)),
        ([{**WAITS, "script": "P.on_log (a.py:3)"}, {}], (1,)),
        ([{**WAITS, "step": 7}, {**WAITS, "step": 7}], ()),
    ],
)
def test_the_verdict_names_the_slow_ranks(reports: list[dict[str, Any]], slow: tuple[int, ...]) -> None:
    verdict = judge([report(rank, **more) for rank, more in enumerate(reports)])
    assert verdict.slow == slow
    assert verdict.why


def counts_of_pairs() -> dict[str, int]:
    """Rank 1 has started one collective more in its group, which has the description of that of rank 0."""
    group = [dist.new_group([rank], group_desc="pairs") for rank in (0, 1)][dist.get_rank()]
    for _ in range(1 + dist.get_rank()):
        dist.all_reduce(torch.ones(1), group=group)
    counts = {name: number for name, number in collective_counts().items() if name.startswith("pairs")}
    dist.destroy_process_group(group)
    return counts


def test_groups_of_other_ranks_are_not_compared() -> None:
    counts = pool(2).run(counts_of_pairs)
    assert [list(one.values()) for one in counts] == [[1], [2]]
    assert judge([report(rank, **WAITS, counts=counts[rank]) for rank in (0, 1)]).slow == ()


def code_in(path: str) -> Any:
    """A function that looks at its own frame, from a file of this name."""
    names: dict[str, Any] = {"look": lambda f: (frame_lines(f), in_debugger(f))}
    exec(compile("import sys\ndef ask(): return look(sys._getframe())", path, "exec"), names)
    return names["ask"]


def test_stack_frames_distinguish_collectives_from_debuggers() -> None:
    stack, debugged = code_in("/somewhere/torch/distributed/distributed_c10d.py")()
    assert collective_frame(stack) == "ask" and not debugged
    stack, debugged = code_in("/somewhere/train.py")()
    assert collective_frame(stack) is None and not debugged
    assert stack[-1] == "/somewhere/train.py:2 in ask"
    assert code_in("/somewhere/pdb.py")()[1] and code_in("/somewhere/debugpy/server/api.py")()[1]


def test_the_call_of_a_script_is_named() -> None:
    """The method that a training has called, not the script that has begun it, and not a model."""
    package = Path(ds_trainer.__file__).parent

    def found(owner: Any, *paths: str) -> str:
        names: dict[str, Any] = {"self": owner, "call": lambda: script_call(sys._getframe(1))}
        for number, path in enumerate(paths):
            code = f"def call(self=self, inner=call):\n return inner()  # {number}"
            exec(compile(code, str(package / path), "exec"), names)
        return str(names["call"]())

    inside, around = ("accelerator/a.py", "/own/trainer.py"), ("callbacks/protocol.py", "training/train_loop.py")
    assert found(1, *inside, *around, "/own/main.py") == "int.call (/own/trainer.py:2)"
    assert found(1, *inside, "training/trainer.py", "/own/other.py", *around) == "int.call (/own/trainer.py:2)"
    assert found(None, "/own/trainer.py", "/own/main.py") == found(1, *around, "/own/main.py") == ""
    assert found(nn.Linear(1, 1), *inside, *around) == ""


def test_one_sentence_joins_what_all_ranks_do() -> None:
    gather = {"collective": "all_gather", "position": "layers.13 of micro-batch 3"}
    reports = [report(rank, **gather) for rank in range(8)]
    reports[6] = report(6, position="layers.12.mlp of micro-batch 3")
    assert joined(reports, judge(reports).slow) == (
        "rank 6 is in layers.12.mlp of micro-batch 3; "
        "the other 7 are waiting in all_gather in layers.13 of micro-batch 3"
    )
    reports[5] = report(5, phase="data loading")
    assert joined(reports, (5, 6)).startswith("rank 5 is in data loading; rank 6 is in layers.12.mlp")


class Where(nn.Module):
    """Keeps its position while it runs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.found = position(sys._getframe())
        return inputs


def test_a_position_is_the_innermost_module() -> None:
    where = Where()
    nn.Sequential(nn.Linear(2, 2), nn.Sequential(where))(torch.ones(2))
    assert where.found == "1.0"
    assert position(sys._getframe()) == ""

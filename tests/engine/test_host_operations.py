"""The work of a host does not grow with the number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.forks import in_a_fork

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they are scripts, not a package

import host_time as benchmark


class Operations(TorchDispatchMode):
    """Counts the operations of torch inside."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def operations(function: Callable[[], None]) -> int:
    with Operations() as counted:
        function()
    return counted.number


def counts(ranks: int, deepspeeds: bool, counted: Any = operations, stage: int = 3) -> dict[str, float]:
    benchmark._seconds = counted  # in a fork
    return benchmark.measure(benchmark.Shape(2, 3), stage, ranks, deepspeeds)


def python_calls(function: Callable[[], None]) -> int:
    number = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)  # a backward pass on a CPU runs in this thread
    try:
        function()
    finally:
        sys.setprofile(None)
    return number


@pytest.mark.parametrize(
    "deepspeeds", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["ours", "control: DeepSpeed's"]
)
def test_a_micro_batch_has_no_operations_for_each_rank(deepspeeds: bool) -> None:
    few, many = (in_a_fork(counts, ranks, deepspeeds) for ranks in (8, 1024))
    assert few["micro-batch"] > 100
    if deepspeeds:  # it has, so this counts them
        assert many["micro-batch"] > few["micro-batch"] + 1024
    else:  # a gradient may be reduced in another dtype: one more per tensor
        assert many["micro-batch"] - few["micro-batch"] in (0, few["tensors"])


def test_a_micro_batch_has_about_half_of_the_python_calls_of_deepspeed() -> None:
    """The time is 0.59 of DeepSpeed's (docs/explanation/scale.md): some of it is torch's and the model's.

    0.40 with torch 2.13; 0.51 with torch 2.14, which reads the signature of an autograd.Function in C, where nobody can
    keep it.
    """
    ours, theirs = (in_a_fork(counts, 8, deepspeeds, python_calls) for deepspeeds in (False, True))
    assert 1000 < ours["micro-batch"] < 0.55 * theirs["micro-batch"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_work_of_a_host_is_the_same_at_1024_ranks(stage: int) -> None:
    few, many = (in_a_fork(counts, ranks, False, python_calls, stage) for ranks in (8, 1024))
    for phase in ("micro-batch", "step"):
        assert 100 < many[phase] <= 1.05 * few[phase]
    assert many["creation"] - few["creation"] < 20 * 1024  # some dictionaries have an entry for each rank

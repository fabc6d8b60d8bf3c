"""The table of divided experts: families, sizes, ZeRO, accumulation, other axes and recomputation against one process.

The whole table, which is printed, takes hours::

    pytest -m "matrix or not matrix" -s tests/training/test_expert_table.py
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.support.compare import distances
from tests.support.expert_models import CONFIGURATIONS
from tests.support.pool import RankFailure
from tests.training.test_expert_parallel import Case, compared, train

AXES = (None, "tensor", "context", "sequence")
BOUND = 1e-6


class Row(NamedTuple):
    """A line of the table."""

    family: str
    experts: int
    stage: int
    accumulation: int
    axis: str | None
    recomputes: bool

    @property
    def name(self) -> str:
        """Such as ``mixtral-ep2-zero3-accumulate3-tensor-recomputes``."""
        parts = [self.family, f"ep{self.experts}", f"zero{self.stage}", f"accumulate{self.accumulation}"]
        return "-".join([*parts, *([self.axis] if self.axis else []), *["recomputes"] * self.recomputes])

    @property
    def ranks(self) -> int:
        """As few as have these sizes."""
        return max(2, self.experts) * (2 if self.axis == "tensor" else 1)


def rows() -> list[Row]:
    """All combinations, shuffled: a few of them are of all kinds."""
    found = [
        Row(*values) for values in itertools.product(CONFIGURATIONS, (1, 2, 4), range(4), (1, 3), AXES, (False, True))
    ]
    random.Random(0).shuffle(found)
    return found


REFUSED = {
    "olmoe": ("tensor",),
    "qwen3_next": ("context", "sequence"),
    "gpt_oss": ("context", "sequence"),
    "qwen3_vl_moe": ("context", "sequence", "tensor"),
}
"""Axes that are refused for a model, with whole experts too."""


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Its lines, printed at the end."""
    lines: list[str] = []
    yield lines
    print("", *sorted(lines), sep="\n")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
@pytest.mark.cases(24, rest="matrix")
@pytest.mark.extended
def test_equals_one_process(row: Row, table: list[str], tmp_path: Any) -> None:
    axes = ((row.axis, 2),) if row.axis else ()
    case = Case(row.ranks, row.experts, row.stage, row.family, row.accumulation, row.recomputes, axes)
    if row.axis in REFUSED.get(row.family, ()):
        with pytest.raises(RankFailure, match="ConfigError"):
            train(case, tmp_path, batch=12)
        table.append(f"{row.name:60} refused, with whole experts too")
        return
    found = distances(*compared(case, tmp_path, batch=12))
    text = ", ".join(f"{name} {value:.1e}" for name, value in found.items() if name != "learning_rates")
    table.append(f"{row.name:60} {text}")
    assert max(found.values()) <= BOUND, text

"""The table of docs/explanation/loss.md is the simulation's, and the limits of the compiler follow from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ds_trainer.config.communication import FLOAT32_SUMS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they are scripts, not a package

from gradient_sums import SIGNALS, ring, row, sum_in, tree

pytestmark = pytest.mark.extended  # starts launchers, machines or scripts

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "loss.md"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("terms", [8, 64, 256])
def test_the_page_has_the_results_of_the_simulation(terms: int) -> None:
    assert row(terms) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FLOAT32_SUMS)
def test_from_the_limit_on_a_sum_in_16_bits_is_off_by_one_per_cent(name: str) -> None:
    def worst(terms: int) -> float:
        return max(sum_in(ring, DTYPES[name], DTYPES[name], terms, noise).error for noise in SIGNALS.values())

    assert worst(FLOAT32_SUMS[name] // 2) < 0.01 <= worst(FLOAT32_SUMS[name])
    in_float32 = [
        sum_in(ring, torch.float32, DTYPES[name], FLOAT32_SUMS[name], noise).error for noise in SIGNALS.values()
    ]
    assert max(in_float32) < 1e-6


def test_orders_add_all_terms() -> None:
    terms = torch.arange(64.0).reshape(16, 4)
    assert torch.equal(ring(terms), terms.sum(0))
    assert torch.equal(tree(terms), terms.sum(0))

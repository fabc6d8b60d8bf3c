"""Simulates the error of gradient sums in 16 bits, in the order of a ring and of a tree, for 8 to 4,096 terms.

A ring reduces a chunk by passing it from rank to rank, and each rank adds its part: one rounding per rank. Accumulation
over micro-batches is the same sum. A tree adds pairs: one rounding per level. The terms are gradients that agree (all
ranks have the same signal and a little noise), that half agree, and that are mostly noise. Each term is rounded to 16
bits, like the result of a backward pass. The error is that of the sum alone, relative to the exact sum (2-norm).

    python benchmarks/gradient_sums.py               the table of docs/explanation/loss.md
    python benchmarks/gradient_sums.py --norms       the change of the norm of the sum
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch

RANKS = tuple(2**power for power in range(3, 13))
ELEMENTS = 4096
SIGNALS = {"agree": 0.1, "half agree": 1.0, "mostly noise": 10.0}
"""Standard deviation of a rank's noise, where that of the signal is one."""


class Sum(NamedTuple):
    """How a sum came out: relative 2-norm of its error, relative change of its own 2-norm."""

    error: float
    norm: float


def ring(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, one after the other, in the type of ``terms``."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def tree(terms: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, a power of two, in pairs."""
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def terms_of(ranks: int, noise: float, elements: int = ELEMENTS) -> torch.Tensor:
    """Gradients of all ranks: one signal and noise of each rank's own, float32 [ranks, elements]."""
    generator = torch.Generator().manual_seed(ranks)
    signal = torch.randn(elements, generator=generator)
    return (signal + noise * torch.randn(ranks, elements, generator=generator)) / ranks


def sum_in(order: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, born: torch.dtype, *of: float) -> Sum:
    """The sum of gradients that were computed in ``born``, made in ``dtype``; ``of`` is the ranks and their noise."""
    terms = terms_of(int(of[0]), of[1]).to(born)
    exact = terms.double().sum(0)
    found = order(terms.to(dtype)).double()
    return Sum(float((found - exact).norm() / exact.norm()), float(found.norm() / exact.norm() - 1))


COLUMNS = {
    "bf16, ring": (ring, torch.bfloat16, torch.bfloat16),
    "bf16, tree": (tree, torch.bfloat16, torch.bfloat16),
    "fp16, ring": (ring, torch.float16, torch.float16),
    "fp32, ring": (ring, torch.float32, torch.bfloat16),
}


def table(norms: bool = False) -> str:
    """A table in Markdown: a row for each number of terms; of each column the worst of the three kinds of terms."""
    rows = [f"| terms | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    return "\n".join([*rows, *(row(ranks, norms) for ranks in RANKS)])


def row(ranks: int, norms: bool = False) -> str:
    """The row of the table for ``ranks`` terms."""
    cells = []
    for column in COLUMNS.values():
        found = [sum_in(*column, ranks, noise) for noise in SIGNALS.values()]
        worst = max((abs(one.norm), one.norm) for one in found)[1] if norms else max(one.error for one in found)
        cells.append(f"{worst:+.2%}" if norms else f"{worst:.2%}" if worst >= 5e-5 else f"{worst:.0e}")
    return f"| {ranks:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norms", action="store_true", help="the change of the norm instead of the error")
    print(table(parser.parse_args().norms))

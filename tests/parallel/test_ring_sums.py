"""Sums of ring attention are made in float32: many small gradients in 16 bits beside a large one are not lost."""

from __future__ import annotations

import pytest
import torch

from ds_trainer.parallel.ring_attention import _GradientSum, _MergedOutput


@pytest.mark.parametrize("whole_first", [True, False])
def test_gradients_of_many_blocks(whole_first: bool) -> None:
    """In bf16, 256 + 1 is 256: eight parts of 1 would all be lost."""
    like = torch.zeros(1, 1, 4, 2, dtype=torch.bfloat16)
    found = _GradientSum(like, torch.float32)
    if whole_first:
        found.add(slice(0, 4), torch.full_like(like, 256.0))
    else:
        for half in (slice(0, 2), slice(2, 4)):
            found.add(half, torch.full_like(like[:, :, half], 256.0))
    for _ in range(8):
        found.add(slice(1, 3), torch.ones(1, 1, 2, 2, dtype=torch.bfloat16))
    total = found.total()
    assert total.dtype == torch.float32
    assert total[0, 0, :, 0].tolist() == [256.0, 264.0, 264.0, 256.0]


def test_a_single_gradient_block_is_not_copied() -> None:
    block = torch.ones(1, 1, 4, 2, dtype=torch.bfloat16)
    found = _GradientSum(torch.zeros_like(block), torch.float32)
    found.add(slice(0, 4), block)
    assert found.total() is block


def test_a_gradient_of_some_rows_is_padded_with_zeros() -> None:
    """The first part may be of some queries only; the others see nothing, and get 0."""
    query = torch.zeros(1, 1, 4, 2)
    merged = _MergedOutput(query, query)
    merged.add(slice(2, 4), torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2))
    out, lse = merged.result()
    assert out[0, 0, :, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert lse[0, 0].tolist() == [-torch.inf, -torch.inf, 0.0, 0.0]

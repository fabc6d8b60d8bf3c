"""Triton kernels for tiles of logits on NVIDIA GPUs: each reads a tile once, where torch's operators take five passes.

Import this only where Triton is installed, as it is with every torch for CUDA. The functions are those of
:mod:`ds_trainer.parallel.linear_cross_entropy`, which says what is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # columns of a tile that a program holds in registers
_WARPS = 8


def add_statistics(
    tile: torch.Tensor,
    columns: torch.Tensor,
    largest: torch.Tensor,
    exponentials: torch.Tensor,
    at_target: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    """Take a tile into the statistics of its tokens, in place.

    Args:
        tile: logits ``[tokens, rows]`` in float32; unchanged.
        columns: ``[tokens]``, the column of each token's target; it is in the tile if it is from 0 to ``rows`` - 1.
        largest: ``[tokens]``, the largest logit so far, a finite number.
        exponentials: ``[tokens]``, the sum of ``exp(logits - largest)`` so far.
        at_target: ``[tokens]``, the logit of the target, if it is in a tile so far.
        total: ``[tokens]``, the sum of all logits so far; None if it is not needed.
    """
    tokens, rows = tile.shape
    _statistics[(tokens,)](
        tile,
        tile.stride(0),
        rows,
        columns,
        largest,
        exponentials,
        at_target,
        largest if total is None else total,
        WITH_TOTAL=total is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def gradient(
    tile: torch.Tensor,
    columns: torch.Tensor,
    lse: torch.Tensor,
    share: torch.Tensor,
    at_target: torch.Tensor,
    spread: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of a tile of logits, ``[tokens, rows]`` in ``dtype``: ``exp(tile - lse) * share - spread``, plus
    ``at_target`` in the column of the target. All but ``tile`` are ``[tokens]``, in float32.
    """
    tokens, rows = tile.shape
    result = torch.empty(tokens, rows, dtype=dtype, device=tile.device)
    _gradient[(tokens,)](
        tile,
        tile.stride(0),
        result,
        rows,
        columns,
        lse,
        share,
        at_target,
        lse if spread is None else spread,
        WITH_SPREAD=spread is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return result


@triton.jit
def _statistics(
    tile,
    stride,
    rows,
    columns,
    largest,
    exponentials,
    at_target,
    total,
    WITH_TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits = tile + token * stride
    most = tl.load(largest + token)
    sum_of_exponentials = tl.load(exponentials + token)
    sum_of_logits = 0.0
    for start in range(0, rows, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < rows
        values = tl.load(logits + places, mask=inside, other=float("-inf"))
        now = tl.maximum(most, tl.max(values, axis=0))
        added = tl.sum(tl.exp(values - now), axis=0)
        sum_of_exponentials = sum_of_exponentials * tl.exp(most - now) + added
        most = now
        if WITH_TOTAL:
            sum_of_logits += tl.sum(tl.where(inside, values, 0.0), axis=0)
    tl.store(largest + token, most)
    tl.store(exponentials + token, sum_of_exponentials)
    if WITH_TOTAL:
        tl.store(total + token, tl.load(total + token) + sum_of_logits)
    column = tl.load(columns + token)
    if (column >= 0) & (column < rows):
        tl.store(at_target + token, tl.load(logits + column))


@triton.jit
def _gradient(
    tile,
    stride,
    found,
    rows,
    columns,
    lse,
    share,
    at_target,
    spread,
    WITH_SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits = tile + token * stride
    gradients = found + token * rows
    of_lse = tl.load(lse + token)
    of_share = tl.load(share + token)
    of_target = tl.load(at_target + token)
    column = tl.load(columns + token)
    for start in range(0, rows, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < rows
        values = tl.load(logits + places, mask=inside, other=float("-inf"))
        result = tl.exp(values - of_lse) * of_share
        result += tl.where(places == column, of_target, 0.0)
        if WITH_SPREAD:
            result -= tl.load(spread + token)
        tl.store(gradients + places, result.to(found.dtype.element_ty), mask=inside)

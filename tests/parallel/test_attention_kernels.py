"""The kernels of one block against attention by its definition in float64, and the contracts of the CUDA operators.

The CPU operator runs for real. Those of CUDA run here only as shapes (meta tensors, through the real signatures) and
against a stand-in that computes by the definition but holds its callers to what the CUDA code asks for; the tests
marked ``gpu`` run the real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.parallel.attention_kernels import CpuFlash, CudaFlash, Efficient, Kernel, Math, kernel_for
from tests.support.attention import dense_attention

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
SCALE = 0.3
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
MASKS = ("none", "causal", "mask", "one mask for all", "empty rows")
_aten = torch.ops.aten


def tensors(
    dtype: torch.dtype, device: str, kind: str, key_heads: int, head_dim: int = 16, value_dim: int | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Query, key, value, gradient of the output (parts of larger tensors, as slices of a rank's tokens are); mask."""
    torch.manual_seed(0)
    queries, keys = (21, 21) if kind == "causal" else (21, 35)
    value_dim = value_dim or head_dim
    shapes = [
        (4, queries, head_dim),
        (key_heads, keys, head_dim),
        (key_heads, keys, value_dim),
        (4, queries, value_dim),
    ]
    made = [
        torch.randn(2, heads, 2 * tokens, width, dtype=torch.float64).to(device, dtype)[:, :, tokens:]
        for heads, tokens, width in shapes
    ]
    if kind in ("none", "causal"):
        return made, None
    mask = torch.rand(1 if kind == "one mask for all" else 2, 1, queries, keys) < 0.5
    mask[..., 0] = True
    if kind == "empty rows":
        mask[0, :, 3] = mask[:, :, 7] = False
    return made, mask.to(device)


def distance_to_the_definition(
    kernel: Kernel, made: list[Tensor], mask: Tensor | None, causal: bool, of_all: Callable[[Tensor], Tensor]
) -> float:
    """Largest difference of output, lse and gradients, relative to the largest value of each.

    ``of_all`` makes the lse that goes backward: that of all keys, of which the block may have a part only.
    """
    query, key, value, grad_out = made
    leaves = [tensor.detach().double().cpu().requires_grad_() for tensor in (query, key, value)]
    allowed = torch.ones(2, query.shape[2], key.shape[2], dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = mask[:, 0].cpu().expand(2, -1, -1)
    wanted_out, wanted_lse = dense_attention(*leaves, allowed, SCALE)

    out, lse = kernel.forward(query, key, value, causal, mask, SCALE)
    assert out.dtype == query.dtype
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    assert out.shape == (*query.shape[:3], value.shape[3])
    assert torch.equal(lse.cpu() == -math.inf, wanted_lse == -math.inf)
    pairs = [
        (out, wanted_out),
        (lse.masked_fill(lse == -math.inf, 0.0), wanted_lse.masked_fill(~allowed.any(-1)[:, None], 0.0)),
    ]

    # Backward against the lse of more keys than the block has: gradients of sum(grad_out * share * out).
    lse_all = of_all(wanted_lse.detach())
    share = (wanted_lse - lse_all).exp()[..., None]
    share = torch.where(share.isnan(), 0.0, share)
    out_all = (share * wanted_out).detach()  # the other keys have values of 0
    weighted = share * wanted_out
    wanted = torch.autograd.grad(weighted, leaves, grad_out.double().cpu())
    # The other keys' share falls where the block's scores rise: autograd does not see that through a constant lse_all.
    del weighted
    scores_term = _gradients(leaves, allowed, lse_all, out_all, grad_out.double().cpu())
    del wanted
    grads = kernel.backward(
        grad_out,
        query,
        key,
        value,
        out_all.to(query.device, query.dtype),
        lse_all.masked_fill(lse_all == -math.inf, math.inf).to(lse),
        causal,
        mask,
        SCALE,
    )
    for grad, tensor in zip(grads, (query, key, value), strict=True):
        assert grad.shape == tensor.shape
    pairs += list(zip(grads, scores_term, strict=True))
    assert not any(found.isnan().any() for found, _ in pairs)
    return max(float((found.double().cpu() - right).abs().max() / (right.abs().max() + 1e-3)) for found, right in pairs)

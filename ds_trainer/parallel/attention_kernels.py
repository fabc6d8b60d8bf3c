"""Attention of one block of queries on one block of keys, with what is needed to merge blocks and to go backward.

Forward gives, beside the output, the log of the sum of exponentials (*lse*) of every query's scores. Two outputs over
different keys merge exactly by their lse, and the gradients of a block follow from the output and lse of *all* keys
without a second softmax: that is how FlashAttention-2 (Dao 2023, arXiv 2307.08691) goes backward, and its kernels take
both as arguments. So any kernel here works on a block as if it were the whole.

==================  ====================================================  ==========================================
kernel              operator of torch                                     used for
==================  ====================================================  ==========================================
:class:`CpuFlash`   ``_scaled_dot_product_flash_attention_for_cpu``       CPU, float16 to float64, with or without mask
:class:`CudaFlash`  ``_scaled_dot_product_flash_attention``               NVIDIA since Ampere, 16 bits, no mask
:class:`Efficient`  ``_scaled_dot_product_efficient_attention``           NVIDIA: with a mask, or float32
:class:`Math`       matrix products and a softmax in float32 or float64   everything else; holds all scores of a block
==================  ====================================================  ==========================================

Layout of all tensors: ``[batch, heads, tokens, head_dim]``; keys and values may have fewer heads (grouped queries).
There is no dropout.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Kernel(Protocol):
    """One way to compute a block.

    ``mask`` is bool ``[batch or 1, 1, queries, keys]``, true where a query may see a key; ``causal`` (for square
    blocks, without mask) lets query ``i`` see keys ``0..i``. A query that sees nothing gives 0 and a lse of minus
    infinity.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output in the dtype of ``query``; lse ``[batch, heads, queries]`` in float32 (float64 for float64)."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of ``query``, ``key`` and ``value`` by this block.

        ``out`` and ``lse`` are those over *all* keys; the lse of a query that sees none at all is *plus* infinity here,
        so that every weight ``exp(score - lse)`` of it is 0.
        """
        ...


def kernel_for(query: Tensor, value: Tensor, masked: bool) -> Kernel:
    """The quickest kernel that can compute a block of such tensors, with or without a mask."""
    if query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64, *_SIXTEEN_BITS):
        return CpuFlash()
    if query.device.type == "cuda" and torch.version.hip is None:
        ampere = torch.cuda.get_device_capability(query.device) >= (8, 0)
        if ampere and query.dtype in _SIXTEEN_BITS and not masked and max(query.shape[-1], value.shape[-1]) <= 256:
            return CudaFlash()
        if query.dtype in (torch.float32, torch.float16) or (ampere and query.dtype == torch.bfloat16):
            return Efficient()
    return Math()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what blocks of this dtype are summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class CpuFlash:
    """The tiled kernel of CPUs; takes grouped queries, and a mask as a term that is added to the scores."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        width = max(query.shape[-1], value.shape[-1])
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            _widened(query, width),
            _widened(key, width),
            _widened(value, width),
            0.0,
            causal,
            attn_mask=None if mask is None else _bias(mask, query.dtype),
            scale=scale,
        )
        return _without_empty_rows(out[..., : value.shape[-1]], lse, mask)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = max(query.shape[-1], value.shape[-1])
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _widened(grad_out, width),
            _widened(query, width),
            _widened(key, width),
            _widened(value, width),
            _widened(out, width),
            lse,
            0.0,
            causal,
            attn_mask=None if mask is None else _bias(mask, query.dtype),
            scale=scale,
        )
        return _narrowed(grads, query, key, value)


class CudaFlash:
    """FlashAttention-2 as torch brings it: one width of head for all, a multiple of 8; takes grouped queries."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        if mask is not None:
            raise ValueError("the flash kernel of CUDA takes no mask; kernel_for gives one that does")
        width = _multiple(max(query.shape[-1], value.shape[-1]), 8)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            _widened(query, width), _widened(key, width), _widened(value, width), 0.0, causal, False, scale=scale
        )
        return out[..., : value.shape[-1]], lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask is not None:
            raise ValueError("the flash kernel of CUDA takes no mask; kernel_for gives one that does")
        width = _multiple(max(query.shape[-1], value.shape[-1]), 8)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            _widened(grad_out, width),
            _widened(query, width),
            _widened(key, width),
            _widened(value, width),
            _widened(out, width),
            lse.contiguous(),  # read as if it were
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            *_unused_seeds(query, torch.uint64, (2,)),
            scale=scale,
        )
        return _narrowed(grads, query, key, value)


class Efficient:
    """xFormers' memory-efficient kernel as torch brings it: as many heads of keys as of queries, aligned masks."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads = query.shape[1]
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            _aligned(query),
            _aligned(_repeated(key, heads)),
            _aligned(_repeated(value, heads)),
            None if mask is None else _aligned_bias(mask, query),
            True,
            0.0,
            causal,
            scale=scale,
        )
        # The lse comes padded to a multiple of 32 queries.
        return _without_empty_rows(out[..., : value.shape[-1]], lse[..., : query.shape[2]], mask)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, tokens = query.shape[1:3]
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            _aligned(grad_out),
            _aligned(query),
            _aligned(_repeated(key, heads)),
            _aligned(_repeated(value, heads)),
            None if mask is None else _aligned_bias(mask, query),
            # The kernel asks for two of the strides of `out` and takes the third to be that of [batch, tokens, heads,
            # head_dim] in memory, which is how its forward pass writes it.
            _aligned(out).transpose(1, 2).contiguous().transpose(1, 2),
            F.pad(lse, (0, _multiple(tokens, 32) - tokens), value=math.inf).contiguous(),
            *_unused_seeds(torch.empty(0), torch.int64, ()),  # its forward pass returns them on the host, too
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        grad_query, grad_key, grad_value = _narrowed(grads[:3], query, key, value)
        return grad_query, _summed(grad_key, key.shape[1]), _summed(grad_value, value.shape[1])


class Math:
    """The definition, for devices and dtypes without a kernel: all scores of the block are in memory at once.

    With ``s = scale * q k'`` and ``p = exp(s - lse)``: ``out = p v``, and backward ``dv = p' dout``,
    ``ds = p * (dout v' - rowsum(dout * out))``, ``dq = scale * ds k``, ``dk = scale * ds' q``.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = self._scores(query, key, causal, mask, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp_()
        out = weights @ _repeated(value, query.shape[1]).to(scores.dtype)
        return out.to(query.dtype), lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = query.shape[1]
        scores = self._scores(query, key, causal, mask, scale)
        weights = (scores - lse.unsqueeze(-1)).exp_()
        grad_out = grad_out.to(scores.dtype)
        grad_value = weights.mT @ grad_out
        grad_weights = grad_out @ _repeated(value, heads).to(scores.dtype).mT
        own = (grad_out * out.to(scores.dtype)).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - own) * scale
        grad_query = grad_scores @ _repeated(key, heads).to(scores.dtype)
        grad_key = grad_scores.mT @ query.to(scores.dtype)
        return grad_query, _summed(grad_key, key.shape[1]), _summed(grad_value, value.shape[1])

    @staticmethod
    def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
        dtype = accumulation_dtype(query.dtype)
        scores = (query.to(dtype) * scale) @ _repeated(key, query.shape[1]).to(dtype).mT
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores if mask is None else scores.masked_fill_(~mask, -math.inf)


# -- what the operators want ---------------------------------------------------------------------------------------


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _widened(tensor: Tensor, width: int) -> Tensor:
    """Heads padded by zeros to ``width``, with an innermost stride of 1: no score and no output changes."""
    if tensor.shape[-1] < width:
        return F.pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    return _widened(tensor, _multiple(tensor.shape[-1], 8))


def _narrowed(
    grads: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Without the padding of :func:`_widened`."""
    of_query, of_key, of_value = grads
    return of_query[..., : query.shape[-1]], of_key[..., : key.shape[-1]], of_value[..., : value.shape[-1]]


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Every head of keys once for each head of queries that uses it."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The transpose of :func:`_repeated`."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: 0, or minus infinity where a query may not see a key."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _aligned_bias(mask: Tensor, query: Tensor) -> Tensor:
    """The same for every batch and head, with rows that begin at multiples of 16 elements."""
    *others, keys = mask.shape
    padded = torch.zeros(*others, _multiple(keys, 16), dtype=query.dtype, device=mask.device)
    bias = padded[..., :keys].masked_fill_(~mask, -math.inf)
    return bias.expand(query.shape[0], query.shape[1], -1, -1)


def _without_empty_rows(out: Tensor, lse: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the operators give for a query without any key (a lse of 0, a nan) replaced by an output of 0."""
    if mask is None:
        return out, lse
    empty = ~mask.any(-1)
    return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -math.inf)


def _unused_seeds(like: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that is not there."""
    return torch.zeros(shape, dtype=dtype, device=like.device), torch.zeros((), dtype=dtype, device=like.device)

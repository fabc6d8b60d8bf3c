"""Attention of one block of queries on one block of keys, with the values needed to merge blocks and for backward.

Besides the output, the forward pass returns the log-sum-exp (*lse*) of every query's scores. Two outputs over different
keys can be merged exactly by their lse, and the gradients of a block follow from the output and lse over *all* keys
without a second softmax: this is the backward pass of FlashAttention-2 (Dao 2023, arXiv 2307.08691), whose kernels take
both as arguments. So each kernel treats a block as if it were the full attention.

==================  ====================================================  ==========================================
kernel              torch operator                                        used for
==================  ====================================================  ==========================================
:class:`CpuFlash`   ``_scaled_dot_product_flash_attention_for_cpu``       CPU, float16 to float64, with or without mask
:class:`Cudnn`      ``_scaled_dot_product_cudnn_attention``               NVIDIA, 16 bits, no mask, where torch itself
                                                                          would take it: since Hopper
:class:`CudaFlash`  ``_scaled_dot_product_flash_attention``               NVIDIA since Ampere, 16 bits, no mask
:class:`Efficient`  ``_scaled_dot_product_efficient_attention``           NVIDIA: with a mask, or float32
:class:`Math`       matrix products and a softmax in float32 or float64   everything else; holds all scores of a block
==================  ====================================================  ==========================================

Layout of all tensors: ``[batch, heads, tokens, head_dim]``; keys and values may have fewer heads (grouped queries).
There is no dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_LARGEST_CUDNN_HEAD = 128  # for gradients
_SHORTEST_CUDNN_BLOCK = 64  # cuDNN builds a plan for every new shape; short blocks have many, and gain nothing


class BlockInputs(NamedTuple):
    """The inputs of one block of attention.

    Attributes:
        query: ``[batch, heads, queries, head_dim]``.
        key, value: ``[batch, key heads, keys, head_dim]``.
        causal: query ``i`` attends to keys ``0..i``; for square blocks without a mask.
        mask: bool ``[batch or 1, 1, queries, keys]``, true where a query may attend to a key; None without a mask.
        scale: factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    mask: Tensor | None
    scale: float


class Kernel(Protocol):
    """One way to compute a block. A query that attends to no key gives an output of 0 and an lse of minus infinity."""

    def forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """Output in the dtype of ``query``; lse ``[batch, heads, queries]`` in float32 (float64 for float64)."""
        ...

    def backward(
        self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's contribution to the gradients of ``query``, ``key`` and ``value``.

        ``out`` and ``lse`` are those over *all* keys. The lse of a query that attends to no key at all must be *plus*
        infinity here, so that all its weights ``exp(score - lse)`` are 0.
        """
        ...


def kernel_for(inputs: BlockInputs) -> Kernel:
    """The fastest kernel for such a block."""
    query, value, masked = inputs.query, inputs.value, inputs.mask is not None
    if query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64, *_SIXTEEN_BITS):
        return CpuFlash()
    if query.device.type == "cuda" and torch.version.hip is None:
        ampere = torch.cuda.get_device_capability(query.device) >= (8, 0)
        if ampere and query.dtype in _SIXTEEN_BITS and not masked and max(query.shape[-1], value.shape[-1]) <= 256:
            return Cudnn() if _torch_takes_cudnn(inputs) else CudaFlash()
        if query.dtype in (torch.float32, torch.float16) or (ampere and query.dtype == torch.bfloat16):
            return Efficient()
    return Math()


def _torch_takes_cudnn(inputs: BlockInputs) -> bool:
    """Whether torch would compute this block and its gradients with cuDNN: it knows devices, versions, settings."""
    query, key, value, causal, _, scale = inputs
    if max(query.shape[-1], value.shape[-1]) > _LARGEST_CUDNN_HEAD:  # torch is asked without gradients here
        return False
    if min(query.shape[2], key.shape[2]) < _SHORTEST_CUDNN_BLOCK:
        return False
    if not torch.backends.cuda.math_sdp_enabled():  # then torch raises an error if no fast kernel can do it
        return False
    choice = torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=True)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks of this dtype are accumulated: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class CpuFlash:
    """The tiled CPU kernel; supports grouped queries, and a mask as a bias added to the scores."""

    def forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """Attention of one block, with what the backward pass needs."""
        query, key, value, causal, mask, scale = inputs
        width = max(query.shape[-1], value.shape[-1])
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *_widened(width, query, key, value),
            0.0,
            causal,
            attn_mask=None if mask is None else _bias(mask, query.dtype),
            scale=scale,
        )
        return _without_empty_rows(out[..., : value.shape[-1]], lse, mask)

    def backward(
        self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block."""
        query, key, value, causal, mask, scale = inputs
        width = max(query.shape[-1], value.shape[-1])
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_widened(width, grad_out, query, key, value, out),
            lse,
            0.0,
            causal,
            attn_mask=None if mask is None else _bias(mask, query.dtype),
            scale=scale,
        )
        return _narrowed(grads, query, key, value)


class CudaFlash:
    """torch's FlashAttention-2: one head width for all tensors, a multiple of 8; supports grouped queries."""

    def forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """Attention of one block, with what the backward pass needs."""
        query, key, value, causal, scale = _without_mask(inputs)
        width = _multiple(max(query.shape[-1], value.shape[-1]), 8)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            *_widened(width, query, key, value), 0.0, causal, False, scale=scale
        )
        return out[..., : value.shape[-1]], lse

    def backward(
        self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block."""
        query, key, value, causal, scale = _without_mask(inputs)
        width = _multiple(max(query.shape[-1], value.shape[-1]), 8)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *_widened(width, grad_out, query, key, value, out),
            lse.contiguous(),  # the kernel assumes it
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


class Cudnn:
    """cuDNN's kernel, up to twice as fast as FlashAttention-2 since Hopper: one head width, a multiple of 8."""

    def forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """Attention of one block, with what the backward pass needs."""
        query, key, value, causal, scale = _without_mask(inputs)
        width = _multiple(max(query.shape[-1], value.shape[-1]), 8)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *_widened(width, query, key, value), None, True, 0.0, causal, scale=scale
        )
        return out[..., : value.shape[-1]], lse.view(query.shape[:3])  # which has one more dimension, of size 1

    def backward(
        self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block."""
        query, key, value, causal, scale = _without_mask(inputs)
        width = _multiple(max(query.shape[-1], value.shape[-1]), 8)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *_widened(width, grad_out, query, key, value, out),
            lse.contiguous().unsqueeze(-1),
            *_unused_seeds(query, torch.int64, ()),
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            scale=scale,
        )
        return _narrowed(grads, query, key, value)


class Efficient:
    """torch's version of xFormers' memory-efficient kernel: needs equal numbers of heads and aligned masks."""

    def forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """Attention of one block, with what the backward pass needs."""
        query, key, value, causal, mask, scale = inputs
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
        # The kernel pads the lse to a multiple of 32 queries.
        return _without_empty_rows(out[..., : value.shape[-1]], lse[..., : query.shape[2]], mask)

    def backward(
        self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block."""
        query, key, value, causal, mask, scale = inputs
        heads, tokens = query.shape[1:3]
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            _aligned(grad_out),
            _aligned(query),
            _aligned(_repeated(key, heads)),
            _aligned(_repeated(value, heads)),
            None if mask is None else _aligned_bias(mask, query),
            # The kernel reads two strides of `out` and assumes the memory layout [batch, tokens, heads, head_dim], in
            # which its forward pass writes it.
            _aligned(out).transpose(1, 2).contiguous().transpose(1, 2),
            F.pad(lse, (0, _multiple(tokens, 32) - tokens), value=math.inf).contiguous(),
            *_unused_seeds(torch.empty(0), torch.int64, ()),  # its forward pass also returns them on the host
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        grad_query, grad_key, grad_value = _narrowed(grads[:3], query, key, value)
        return grad_query, _summed(grad_key, key.shape[1]), _summed(grad_value, value.shape[1])


class Math:
    """Plain matrix operations for devices and dtypes without a kernel; holds all scores of the block in memory.

    With ``s = scale * q k'`` and ``p = exp(s - lse)``: ``out = p v``, and backward ``dv = p' dout``,
    ``ds = p * (dout v' - rowsum(dout * out))``, ``dq = scale * ds k``, ``dk = scale * ds' q``.
    """

    def forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        """Attention of one block, with what the backward pass needs."""
        query, key, value, causal, mask, scale = inputs
        scores = self._scores(query, key, causal, mask, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp_()
        out = weights @ _repeated(value, query.shape[1]).to(scores.dtype)
        return out.to(query.dtype), lse

    def backward(
        self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value of one block."""
        query, key, value, causal, mask, scale = inputs
        heads = query.shape[1]
        scores = self._scores(query, key, causal, mask, scale)
        weights = (scores - lse.unsqueeze(-1)).exp_()
        grad_out = grad_out.to(scores.dtype)
        grad_value = weights.mT @ grad_out
        grad_weights = grad_out @ _repeated(value, heads).to(scores.dtype).mT
        row_sum = (grad_out * out.to(scores.dtype)).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - row_sum) * scale
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


# -- layouts that the operators require ----------------------------------------------------------------------------


def _without_mask(inputs: BlockInputs) -> tuple[Tensor, Tensor, Tensor, bool, float]:
    query, key, value, causal, mask, scale = inputs
    if mask is not None:
        raise ValueError("this kernel takes no mask; use kernel_for to get one that does")
    return query, key, value, causal, scale


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _widened(width: int, *tensors: Tensor) -> Iterator[Tensor]:
    """Pads heads with zeros to ``width``, with an innermost stride of 1; scores and outputs do not change."""
    for tensor in tensors:
        if tensor.shape[-1] < width:
            yield F.pad(tensor, (0, width - tensor.shape[-1]))
        else:
            yield tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    return next(_widened(_multiple(tensor.shape[-1], 8), tensor))


def _narrowed(
    grads: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Removes the padding of :func:`_widened`."""
    grad_query, grad_key, grad_value = grads
    return grad_query[..., : query.shape[-1]], grad_key[..., : key.shape[-1]], grad_value[..., : value.shape[-1]]


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Repeats every key head for each query head that uses it."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The transpose of :func:`_repeated`."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias added to the scores: 0, or minus infinity where a query may not attend to a key."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _aligned_bias(mask: Tensor, query: Tensor) -> Tensor:
    """The bias expanded to every batch and head, with rows that start at multiples of 16 elements."""
    *others, keys = mask.shape
    padded = torch.zeros(*others, _multiple(keys, 16), dtype=query.dtype, device=mask.device)
    bias = padded[..., :keys].masked_fill_(~mask, -math.inf)
    return bias.expand(query.shape[0], query.shape[1], -1, -1)


def _without_empty_rows(out: Tensor, lse: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Replaces the operators' results for a query without keys (an lse of 0, nan) with an output of 0."""
    if mask is None:
        return out, lse
    empty = ~mask.any(-1)
    return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -math.inf)


def _unused_seeds(like: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Seed and offset of a dropout that is disabled."""
    return torch.zeros(shape, dtype=dtype, device=like.device), torch.zeros((), dtype=dtype, device=like.device)

"""Attention within the samples of packed rows, without a matrix of all pairs of tokens.

A mask makes a kernel compute the scores of every pair of tokens in a row, of which packed samples need few: with ten
samples a row about a tenth. Here the samples are computed one by one on the CPU, and on NVIDIA GPUs by the kernel of
FlashAttention for sequences of different lengths (``torch.nn.attention.varlen``).

The samples of the present batch are a module global, for the reason given in :mod:`ds_trainer.parallel.attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_NEEDED = {"scale", "window_size"}  # arguments of varlen_attn that its first version did not have


class Documents:
    """The samples in the rows of one batch.

    Args:
        shape: rows and tokens.
        starts: where the samples begin in the concatenated rows, of which each begins one, and the end of the last.

    Attributes:
        shape: see above.
        lengths: tokens of each sample, row after row.
        longest: the largest of them.
    """

    def __init__(self, shape: tuple[int, int], starts: list[int]) -> None:
        self.shape = shape
        self._starts = starts
        self.lengths = [end - start for start, end in pairwise(starts)]
        self.longest = max(self.lengths)
        self._borders: dict[torch.device, torch.Tensor] = {}

    @classmethod
    def of(cls, position_ids: torch.Tensor) -> Documents:
        """From positions ``[rows, tokens]`` on the host: one that is not the previous one plus 1 begins a sample."""
        rows, tokens = position_ids.shape
        begins = pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True).flatten()
        return cls((rows, tokens), [*begins.nonzero().flatten().tolist(), begins.numel()])

    def __reduce__(self) -> Any:
        return Documents, (self.shape, self._starts)  # without what is on a device

    def rows(self, rows: slice) -> Documents:
        """The samples of some of the rows, which are neighbors."""
        tokens = self.shape[1]
        first, last, _ = rows.indices(self.shape[0])
        inside = [start - first * tokens for start in self._starts if first * tokens <= start <= last * tokens]
        return Documents((last - first, tokens), inside)

    def borders(self, device: torch.device) -> torch.Tensor:
        """Where the samples begin in the concatenated rows, and where the last one ends: int32 on ``device``."""
        if device not in self._borders:
            host = torch.tensor(self._starts, dtype=torch.int32)
            pinned = host.pin_memory() if device.type == "cuda" else host  # so that the host does not wait
            self._borders[device] = pinned.to(device, non_blocking=True)
        return self._borders[device]


_active: Documents | None = None


@contextmanager
def use_documents(documents: Documents | None) -> Iterator[None]:
    """Inside, the tokens of a batch are those of ``documents``. Enter it around forward and backward pass."""
    global _active
    outer, _active = _active, documents
    try:
        yield
    finally:
        _active = outer


def active_documents() -> Documents | None:
    """The samples of the present batch; None if it is not known to be packed, and in code that is being compiled: that
    would be compiled again for every batch.
    """
    return None if torch.compiler.is_compiling() else _active


def can_attend(documents: Documents, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether :func:`document_attention` can compute this, and is faster than a mask."""
    expected = documents.shape
    if any((tensor.shape[0], tensor.shape[2]) != expected for tensor in (query, key, value)):
        return False
    if query.device.type == "cpu":
        return True
    if query.device.type != "cuda" or torch.version.hip is not None or not _varlen_arguments() >= _NEEDED:
        return False
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    same = {query.shape[-1], key.shape[-1], value.shape[-1]}
    dtypes = {query.dtype, key.dtype, value.dtype}
    return (
        len(same) == 1
        and len(dtypes) == 1
        and query.dtype in _SIXTEEN_BITS
        and query.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of each token to the tokens of its sample.

    Args:
        query: ``[rows, heads, tokens, head_dim]``.
        key, value: the same, with as many heads or a divisor of them.
        documents: the samples of the rows; :func:`can_attend` holds.
        causal, window, scale: as of :func:`ds_trainer.parallel.attention.attention`.

    Returns:
        ``[rows, heads, tokens, head_dim of value]``.
    """
    compute = _one_by_one if query.device.type == "cpu" else _varlen
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [all tokens, heads, dim]
    out = compute(q, k, v, documents, causal=causal, window=window, scale=scale)
    return out.unflatten(0, documents.shape).transpose(1, 2)


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    # Split, not indexed: the gradient of an index is a tensor of the size of the whole, for each sample.
    parts = [tensor.transpose(0, 1)[None].split(documents.lengths, dim=2) for tensor in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for q, k, v in zip(*parts, strict=True):
        mask = _window_mask(q.shape[2], causal, window)
        is_causal = causal and mask is None
        outputs.append(
            scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped)
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _window_mask(tokens: int, causal: bool, window: int | None) -> torch.Tensor | None:
    """The mask of a window in one sample; None if the sample is not longer than it."""
    if window is None or tokens <= (window if causal else window + 1):
        return None
    positions = torch.arange(tokens)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < window) if causal else distance.abs() <= window


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    borders = documents.borders(query.device)
    before = -1 if window is None else window - 1 if causal else window
    after = 0 if causal else before
    more: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _varlen_arguments() else {}
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        borders,
        borders,
        documents.longest,
        documents.longest,
        scale=scale,
        window_size=(before, after),
        **more,
    )
    assert isinstance(out, torch.Tensor)  # no auxiliary output is asked for
    return out


@lru_cache(maxsize=1)
def _varlen_arguments() -> frozenset[str]:
    """The names of the arguments of ``varlen_attn``; none where torch does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)

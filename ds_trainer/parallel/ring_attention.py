"""Ring attention: exact attention over a sequence that is sharded over a context-parallel group.

Queries stay on their rank. Keys and values travel around the ring; each rank computes its queries on the current block
of keys while the next block is in transit, and merges the partial outputs by their log-sum-exp (Liu et al. 2023, *Ring
Attention with Blockwise Transformers*, arXiv 2310.01889). After as many steps as ranks, every query has seen every key,
and no rank ever held more than two blocks of keys. Steps at which no rank has anything to compute, because of a sliding
window or documents, are left out: blocks then travel several ranks at once.

The backward pass goes around the ring once more with the saved output and log-sum-exp over all keys, so no softmax is
computed twice (FlashAttention-2's backward pass, arXiv 2307.08691). The gradients of a block of keys travel one step
behind it, accumulate a contribution at every rank, and arrive at the rank that owns the block.

Outputs, log-sum-exps and gradients are accumulated in float32 for all input dtypes (float64 for float64).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_trainer.parallel.attention_blocks import AttentionBlocks, BlockKind, attention_blocks
from ds_trainer.parallel.attention_kernels import BlockInputs, accumulation_dtype, kernel_for
from ds_trainer.parallel.sequence_plan import SequencePlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: SequencePlan,
    group: ProcessGroup | None,
    cp_rank: int,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's queries on the keys of all context-parallel ranks. Collective over ``group``.

    A query may attend to a key if the key is valid, both are in one document, and the key is in range: not later if
    ``causal``, and within ``window`` (see :class:`~ds_trainer.parallel.attention_blocks.AttentionBlocks`). A query that
    attends to nothing gives 0. There is no dropout. Autocast casts the inputs as it does for torch's attention.

    Args:
        query: ``[batch, heads, tokens, head_dim]``, tokens in the order of ``plan.context_positions(cp_rank)``.
        key, value: ``[batch, key heads, tokens, head_dim]`` of the same tokens; ``heads`` is a multiple of ``key
            heads``. They are sent without repeating heads. ``value`` may have a different ``head_dim``.
        plan: how the batch is sharded.
        group: the ranks of one context-parallel group, in the order of their ``cp_rank``; None for a single rank.
        cp_rank: this rank's index in the group.
        causal: whether queries ignore later keys.
        window: sliding window in tokens; None for no window.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` if None.

    Returns:
        ``[batch, heads, tokens, head_dim of value]`` in the dtype of the inputs. Differentiable once.

    Raises:
        ValueError: shapes, dtypes, group or rank are inconsistent, or the window is not positive.
    """
    query, key, value = (cast_for_attention(tensor) for tensor in (query, key, value))
    _check(query=query, key=key, value=value, plan=plan, group=group, cp_rank=cp_rank, window=window)
    blocks = attention_blocks(plan, cp_rank, causal, window)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out: Tensor = _RingAttention.apply(query, key, value, blocks, _Ring(group, cp_rank, plan.layout.cp), scale)
    return out


class _RingAttention(torch.autograd.Function):
    """Forward and backward pass around the ring."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: AttentionBlocks, ring: _Ring, scale: float
    ) -> Tensor:
        merged = _MergedOutput(query, value)
        with _no_autocast(query):
            for _, source, k, v in ring.keys_and_values(key, value, blocks.steps):
                for block in blocks.of[source]:
                    rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
                    causal, mask = block.kind is BlockKind.CAUSAL, blocks.mask(source, block, query.device)
                    inputs = BlockInputs(query[:, :, rows], k[:, :, columns], v[:, :, columns], causal, mask, scale)
                    merged.add(rows, *kernel_for(inputs).forward(inputs))
        out, lse = merged.result()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.blocks, ctx.ring, ctx.scale = blocks, ring, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        blocks, ring, scale = ctx.blocks, ctx.ring, ctx.scale
        dtype = accumulation_dtype(query.dtype)
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # for queries without keys, as the kernels expect
        grad_query = _GradientSum(query, dtype)
        in_transit: _Transfer | None = None
        with _no_autocast(query):
            for distance, source, k, v in ring.keys_and_values(key, value, blocks.steps):
                grad_key, grad_value = _GradientSum(k, dtype), _GradientSum(v, dtype)
                for block in blocks.of[source]:
                    rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
                    causal, mask = block.kind is BlockKind.CAUSAL, blocks.mask(source, block, query.device)
                    inputs = BlockInputs(query[:, :, rows], k[:, :, columns], v[:, :, columns], causal, mask, scale)
                    part_query, part_key, part_value = kernel_for(inputs).backward(
                        inputs, grad_out[:, :, rows], out[:, :, rows], lse[:, :, rows]
                    )
                    grad_query.add(rows, part_query)
                    grad_key.add(columns, part_key)
                    grad_value.add(columns, part_value)
                if len(blocks.steps) == 1:  # nothing to send, nothing to pack
                    total_key, total_value = grad_key.total(), grad_value.total()
                    break
                packed = _pack(grad_key.total().to(dtype), grad_value.total().to(dtype))
                if in_transit is not None:
                    packed += in_transit.wait()  # the sum over the previous ranks for this block
                in_transit = ring.pass_on(packed, _GRADIENTS, distance)
            if in_transit is not None:
                total_key, total_value = _unpack(in_transit.wait(), key, value)
        return (
            grad_query.total().to(query.dtype),
            total_key.to(key.dtype),
            total_value.to(value.dtype),
            None,
            None,
            None,
        )


# -- merging -------------------------------------------------------------------------------------------------------


class _MergedOutput:
    """Output and log-sum-exp over the keys seen so far."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._query = query
        self._shape = (*query.shape[:3], value.shape[3])
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges a part: attention of the queries ``rows`` on keys that they have not seen yet."""
        if self._out is None and out.shape == self._shape:
            self._out, self._lse = out, lse  # often the first part is the only one
            return
        merged, merged_lse = self._accumulators()
        merged, merged_lse = merged[:, :, rows], merged_lse[:, :, rows]
        total_lse = torch.logaddexp(merged_lse, lse)
        # The weight of the new part; 0 where neither part has a key.
        weight = (lse - total_lse.masked_fill(total_lse == -math.inf, 0.0)).exp().unsqueeze(-1)
        merged.lerp_(out.to(merged.dtype), weight)
        merged_lse.copy_(total_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in the dtype of the query, and log-sum-exp."""
        out, lse = (self._out, self._lse) if self._out is not None else self._accumulators()
        assert lse is not None
        return out.to(self._query.dtype), lse

    def _accumulators(self) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(self._query.dtype)
        if self._out is None or self._lse is None:
            self._out = torch.zeros(self._shape, dtype=dtype, device=self._query.device)
            self._lse = torch.full(self._shape[:3], -math.inf, dtype=dtype, device=self._query.device)
        self._out = self._out.to(dtype)
        return self._out, self._lse


class _GradientSum:
    """Sum of the gradients from the blocks seen so far."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like = like
        self._dtype = dtype
        self._total: Tensor | None = None

    def add(self, tokens: slice, part: Tensor) -> None:
        """Adds the gradients of ``tokens``."""
        if self._total is None and part.shape == self._like.shape:
            self._total = part  # often the first part is the only one
            return
        self._total = self.total().to(self._dtype)
        self._total[:, :, tokens] += part

    def total(self) -> Tensor:
        """The sum; with a single part, in the dtype of that part."""
        return torch.zeros_like(self._like, dtype=self._dtype) if self._total is None else self._total


# -- communication -------------------------------------------------------------------------------------------------

_KEYS_AND_VALUES, _GRADIENTS = 0, 1  # tags: two transfers between the same ranks can be in flight


class _Transfer:
    """A send to a later rank of the ring and a receive from an earlier one, in flight."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[Work]) -> None:
        self._sent = sent  # must stay alive until it is sent
        self._received = received
        self._works = works

    def wait(self) -> Tensor:
        """Waits for both and returns the received buffer."""
        for work in self._works:
            work.wait()
        return self._received


class _Ring:
    """The ``size`` ranks of a group, each sending to the next, or all to one that is further away."""

    def __init__(self, group: ProcessGroup | None, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self.size = size

    def pass_on(self, buffer: Tensor, tag: int, distance: int) -> _Transfer:
        """Starts sending ``buffer`` ``distance`` ranks on, and receiving one of its shape from as many ranks before."""
        import torch.distributed as dist

        assert self._group is not None  # _check ensures a group for several ranks
        received = torch.empty_like(buffer)
        previous, following = (
            dist.get_global_rank(self._group, (self._rank + step) % self.size) for step in (-distance, distance)
        )
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, following, self._group, tag),
                dist.P2POp(dist.irecv, received, previous, self._group, tag),
            ]
        )
        return _Transfer(buffer, received, works)

    def keys_and_values(
        self, key: Tensor, value: Tensor, steps: Sequence[int]
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yields keys and values of other ranks, starting with this rank's; transfers overlap with computation.

        Args:
            key, value: of this rank.
            steps: distances of the ranks whose keys are needed, :attr:`AttentionBlocks.steps`.

        Yields:
            How far these keys travel next (after the last step, until they are home again), the rank that owns them,
            keys, values.
        """
        packed = _pack(key, value) if len(steps) > 1 else key
        k, v = key, value
        for step, following in zip(steps, [*steps[1:], self.size], strict=True):
            transfer = None
            if following < self.size:
                transfer = self.pass_on(packed, _KEYS_AND_VALUES, following - step)
            yield following - step, (self._rank - step) % self.size, k, v
            if transfer is not None:
                packed = transfer.wait()
                k, v = _unpack(packed, key, value)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Packs both tensors into one buffer: one message instead of two."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a packed buffer into two tensors of the shapes of ``key`` and ``value``."""
    flat_key, flat_value = packed.split([key.numel(), value.numel()])
    return flat_key.view(key.shape), flat_value.view(value.shape)


# -- inputs --------------------------------------------------------------------------------------------------------


def cast_for_attention(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype in which attention computes: that of autocast, as for torch's attention."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: SequencePlan,
    group: ProcessGroup | None,
    cp_rank: int,
    window: int | None,
) -> None:
    """Raises ValueError for inputs that would give wrong results or a hanging ring."""
    cp, tokens = plan.layout.cp, plan.length // plan.layout.cp
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    if any(len(shape) != 4 or shape[2] != tokens for shape in shapes.values()):
        raise ValueError(
            f"ring attention takes [batch, heads, {tokens}, head_dim] ({plan.length} tokens over {cp} context-parallel "
            f"ranks), not {given}"
        )
    batch, heads = query.shape[:2]
    if key.shape[:2] != value.shape[:2] or key.shape[0] != batch or query.shape[3] != key.shape[3]:
        raise ValueError(f"batch, key heads or head_dim differ: {given}")
    if heads % key.shape[1]:
        raise ValueError(f"{heads} query heads are not a multiple of {key.shape[1]} key heads")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}")
    documents = plan.documents
    if documents is not None and (documents.rows, documents.length) != (batch, plan.length):
        sizes = [documents.rows, documents.length]
        raise ValueError(f"plan.documents is {sizes}, but the batch is [{batch}, {plan.length}]")
    if not 0 <= cp_rank < cp:
        raise ValueError(f"cp_rank={cp_rank} is not in 0..{cp - 1}")
    ranks = 1 if group is None else group.size()
    if ranks != cp:
        raise ValueError(f"the plan has {cp} context-parallel ranks, the group {ranks}")
    if group is not None and group.rank() != cp_rank:
        raise ValueError(f"cp_rank={cp_rank}, but this is rank {group.rank()} of the group")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 token; None for no window")

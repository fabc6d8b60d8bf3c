"""Ring attention: exact attention over a sequence that is cut over the ranks of a context-parallel group.

Queries stay where they are. Keys and values travel from rank to rank in a ring; each rank computes its queries on the
block of keys at hand while the next block is on its way, and merges the partial outputs by their log-sum-exp
(Liu et al. 2023, *Ring Attention with Blockwise Transformers*, arXiv 2310.01889). After as many steps as ranks, every
query has met every key, and no rank ever held more than two blocks of keys.

Backward goes round once more with the saved output and log-sum-exp of all keys, so no softmax is computed twice
(FlashAttention-2's backward pass, arXiv 2307.08691). The gradients of a block of keys travel one step behind it,
collect a part at every rank, and arrive where the block came from.

Outputs, log-sum-exps and gradients are summed in float32 whatever the dtype of the inputs (float64 for float64).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_trainer.parallel.attention_blocks import AttentionBlocks, BlockKind, attention_blocks
from ds_trainer.parallel.attention_kernels import accumulation_dtype, kernel_for
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
    """Attention of this rank's queries on the keys of all context-parallel ranks. A collective over ``group``.

    A query may see a key if that key is valid, both are of one document, and the key is near enough: not later if
    ``causal``, and within ``window`` (see :class:`~ds_trainer.parallel.attention_blocks.AttentionBlocks`). A query that
    sees nothing gives 0. There is no dropout. Under autocast the inputs are cast as torch's own attention casts them.

    Args:
        query: ``[batch, heads, tokens, head_dim]``, tokens in the order of ``plan.context_positions(cp_rank)``.
        key, value: ``[batch, key heads, tokens, head_dim]`` of the same tokens; ``heads`` is a multiple of ``key
            heads``. They travel with the heads they have. ``value`` may have another ``head_dim``.
        plan: the cut of the batch.
        group: the ranks of one context-parallel group, in the order of their ``cp_rank``; None for one rank alone.
        cp_rank: place of this rank in it.
        causal: whether a query sees no later key.
        window: sliding window in tokens; None: none.
        scale: factor of the scores; None: ``1 / sqrt(head_dim)``.

    Returns:
        ``[batch, heads, tokens, head_dim of value]`` in the dtype of the inputs. Differentiable once.

    Raises:
        ValueError: shapes, dtypes, group or rank do not fit together, or the window is not positive.
    """
    query, key, value = (cast_for_attention(tensor) for tensor in (query, key, value))
    _check(query, key, value, plan, group, cp_rank, window)
    blocks = attention_blocks(plan, cp_rank, causal, window)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out: Tensor = _RingAttention.apply(query, key, value, blocks, _Ring(group, cp_rank, plan.layout.cp), scale)
    return out


class _RingAttention(torch.autograd.Function):
    """Forward and backward pass round the ring."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: AttentionBlocks, ring: _Ring, scale: float
    ) -> Tensor:
        merged = _Merged(query, value)
        with _no_autocast(query):
            for source, k, v in ring.keys_and_values(key, value):
                for block in blocks.of[source]:
                    rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
                    causal, mask = block.kind is BlockKind.CAUSAL, blocks.mask(source, block, query.device)
                    kernel = kernel_for(query, value, mask is not None)
                    part = kernel.forward(query[:, :, rows], k[:, :, columns], v[:, :, columns], causal, mask, scale)
                    merged.add(rows, *part)
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
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # what kernels take for a query that sees nothing
        grad_query = _Sum(query, dtype)
        on_its_way: _Transfer | None = None
        with _no_autocast(query):
            for source, k, v in ring.keys_and_values(key, value):
                grad_key, grad_value = _Sum(k, dtype), _Sum(v, dtype)
                for block in blocks.of[source]:
                    rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
                    causal, mask = block.kind is BlockKind.CAUSAL, blocks.mask(source, block, query.device)
                    part_query, part_key, part_value = kernel_for(query, value, mask is not None).backward(
                        grad_out[:, :, rows],
                        query[:, :, rows],
                        k[:, :, columns],
                        v[:, :, columns],
                        out[:, :, rows],
                        lse[:, :, rows],
                        causal,
                        mask,
                        scale,
                    )
                    grad_query.add(rows, part_query)
                    grad_key.add(columns, part_key)
                    grad_value.add(columns, part_value)
                if ring.size == 1:  # nothing travels, nothing is packed
                    of_key, of_value = grad_key.total(), grad_value.total()
                    break
                packed = _pack(grad_key.total().to(dtype), grad_value.total().to(dtype))
                if on_its_way is not None:
                    packed += on_its_way.wait()  # what the ranks before have found for this block
                on_its_way = ring.pass_on(packed, _GRADIENTS)
            if on_its_way is not None:
                of_key, of_value = _unpack(on_its_way.wait(), key, value)
        return grad_query.total().to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


# -- merging -------------------------------------------------------------------------------------------------------


class _Merged:
    """Output and log-sum-exp of the keys met so far."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        self._query = query
        self._shape = (*query.shape[:3], value.shape[3])
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a part: attention of the queries ``rows`` on keys that they have not met yet."""
        if self._out is None and out.shape == self._shape:
            self._out, self._lse = out, lse  # the first part is often the only one
            return
        merged, merged_lse = self._accumulators()
        merged, merged_lse = merged[:, :, rows], merged_lse[:, :, rows]
        together = torch.logaddexp(merged_lse, lse)
        # The share of the new part; 0 where neither has a key.
        share = (lse - together.masked_fill(together == -math.inf, 0.0)).exp().unsqueeze(-1)
        merged.lerp_(out.to(merged.dtype), share)
        merged_lse.copy_(together)

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


class _Sum:
    """Gradients by the blocks met so far."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like = like
        self._dtype = dtype
        self._total: Tensor | None = None

    def add(self, places: slice, part: Tensor) -> None:
        """Add the gradients of the tokens at ``places``."""
        if self._total is None and part.shape == self._like.shape:
            self._total = part  # the first part is often the only one
            return
        self._total = self.total().to(self._dtype)
        self._total[:, :, places] += part

    def total(self) -> Tensor:
        """The sum; where there was one part only, in its dtype."""
        return torch.zeros_like(self._like, dtype=self._dtype) if self._total is None else self._total


# -- communication -------------------------------------------------------------------------------------------------

_KEYS_AND_VALUES, _GRADIENTS = 0, 1  # tags: two transfers between the same ranks can be under way


class _Transfer:
    """A buffer on its way to the next rank, while that of the rank before arrives."""

    def __init__(self, sent: Tensor, arriving: Tensor, works: list[Work]) -> None:
        self._sent = sent  # must live until it is gone
        self._arriving = arriving
        self._works = works

    def wait(self) -> Tensor:
        """What arrived."""
        for work in self._works:
            work.wait()
        return self._arriving


class _Ring:
    """The ``size`` ranks of a group, each handing on to the next."""

    def __init__(self, group: ProcessGroup | None, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self.size = size

    def pass_on(self, buffer: Tensor, tag: int) -> _Transfer:
        """Begin to send ``buffer`` to the next rank and to receive one like it from the rank before."""
        import torch.distributed as dist

        assert self._group is not None  # several ranks: _check saw it
        arriving = torch.empty_like(buffer)
        before, after = (dist.get_global_rank(self._group, (self._rank + step) % self.size) for step in (-1, 1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, after, self._group, tag),
                dist.P2POp(dist.irecv, arriving, before, self._group, tag),
            ]
        )
        return _Transfer(buffer, arriving, works)

    def keys_and_values(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every rank's keys and values with its number, the own ones first; the next travel while these are used."""
        packed = _pack(key, value) if self.size > 1 else key
        k, v = key, value
        for step in range(self.size):
            coming = self.pass_on(packed, _KEYS_AND_VALUES) if step + 1 < self.size else None
            yield (self._rank - step) % self.size, k, v
            if coming is not None:
                packed = coming.wait()
                k, v = _unpack(packed, key, value)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """One buffer for both: one message instead of two."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The two tensors, shaped as these, that lie in one buffer one after the other."""
    of_key, of_value = packed.split([key.numel(), value.numel()])
    return of_key.view(key.shape), of_value.view(value.shape)


# -- inputs --------------------------------------------------------------------------------------------------------


def cast_for_attention(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype in which attention computes: that of autocast, as torch's own attention casts."""
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
    """Refuse what would give a wrong result or a hanging ring."""
    cp, tokens = plan.layout.cp, plan.length // plan.layout.cp
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    if any(len(shape) != 4 or shape[2] != tokens for shape in shapes.values()):
        raise ValueError(
            f"ring attention takes [batch, heads, {tokens}, head_dim] ({plan.length} tokens over {cp} context-parallel "
            f"ranks), not {told}"
        )
    batch, heads = query.shape[:2]
    if key.shape[:2] != value.shape[:2] or key.shape[0] != batch or query.shape[3] != key.shape[3]:
        raise ValueError(f"batch, key heads or head_dim differ: {told}")
    if heads % key.shape[1]:
        raise ValueError(f"{heads} heads of queries are no multiple of {key.shape[1]} heads of keys")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}")
    for name, tensor in (("documents", plan.documents), ("valid", plan.valid)):
        if tensor is not None and tuple(tensor.shape) != (batch, plan.length):
            raise ValueError(f"plan.{name} is {list(tensor.shape)}, but the batch is [{batch}, {plan.length}]")
    if not 0 <= cp_rank < cp:
        raise ValueError(f"cp_rank={cp_rank} is not in 0..{cp - 1}")
    ranks = 1 if group is None else group.size()
    if ranks != cp:
        raise ValueError(f"the plan has {cp} context-parallel ranks, the group {ranks}")
    if group is not None and group.rank() != cp_rank:
        raise ValueError(f"cp_rank={cp_rank}, but this is rank {group.rank()} of the group")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 token; None for no window")

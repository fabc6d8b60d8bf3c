"""Ulysses: all-to-alls that turn sharding along the sequence into sharding along the heads, and back.

Outside of attention every rank of ``groups.sp`` holds all heads of some tokens; attention needs all tokens of some
heads. One all-to-all before attention and one after it convert between the two, and each moves every element once::

    [B, H, S, D]  ->  [B, H / sp, S * sp, D]  ->  attention  ->  [B, H / sp, S * sp, D]  ->  [B, H, S, D]

Rank ``r`` receives query heads ``r * H / sp`` to ``(r + 1) * H / sp - 1``. Keys and values may have fewer heads (GQA,
MQA): a rank receives those that its query heads use, so a head used on several ranks is sent to each of them.

Source: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class HeadPartition:
    """Which heads each rank of the sequence-parallel group computes.

    Args:
        query_heads: query heads of one layer on one tensor-parallel rank.
        key_heads: key and value heads; ``query_heads`` is a multiple of it.
        sp: number of sequence-parallel ranks.

    Raises:
        ValueError: the number of query heads is not divisible by ``sp`` or by the number of key heads.
    """

    query_heads: int
    key_heads: int
    sp: int

    def __post_init__(self) -> None:
        if self.query_heads % self.sp:
            raise ValueError(
                f"{self.query_heads} query heads cannot be divided among sp={self.sp} sequence-parallel ranks: "
                "choose a sequence_parallel_size that divides the heads"
            )
        if self.query_heads % self.key_heads:
            raise ValueError(f"{self.query_heads} query heads are not a multiple of {self.key_heads} key heads")

    @property
    def queries(self) -> int:
        """Query heads of one rank."""
        return self.query_heads // self.sp

    @property
    def keys(self) -> int:
        """Key heads that each rank receives: the most that any rank's query heads use."""
        return max(self._last(rank) - self._first(rank) + 1 for rank in range(self.sp))

    def starts(self) -> list[int]:
        """The first key head that each rank receives; it receives :attr:`keys` consecutive heads."""
        return [min(self._first(rank), self.key_heads - self.keys) for rank in range(self.sp)]

    def local_keys(self, rank: int) -> list[int] | None:
        """For each query head of ``rank``, the index of its key head among those received.

        None if equal runs of query heads use the key heads in order, as in GQA: no reordering is needed.
        """
        start, group = self.starts()[rank], self.query_heads // self.key_heads
        used = [head // group - start for head in range(rank * self.queries, (rank + 1) * self.queries)]
        if self.queries % self.keys == 0:
            run = self.queries // self.keys
            if used == [head // run for head in range(self.queries)]:
                return None
        return used

    def elements(self, batch: int, tokens: int, key_dim: int, value_dim: int | None = None) -> int:
        """Elements that one rank passes to the two all-to-alls of one forward pass, including those it keeps.

        ``batch * tokens * (H_q (D_k + D_v) + sp * keys * (D_k + D_v))`` with the local ``tokens``; ``(sp - 1) / sp`` of
        them cross the network. The backward pass moves the same amount, and so does a recomputed forward pass.
        """
        width = key_dim + (key_dim if value_dim is None else value_dim)
        return batch * tokens * width * (self.query_heads + self.sp * self.keys)

    def _first(self, rank: int) -> int:
        return rank * self.queries * self.key_heads // self.query_heads

    def _last(self, rank: int) -> int:
        return ((rank + 1) * self.queries - 1) * self.key_heads // self.query_heads


def scatter_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All heads of this rank's tokens -> this rank's heads of all the group's tokens, in rank order. Collective.

    Args:
        query: ``[batch, query heads, local tokens, head_dim]``.
        key, value: the same with as many or fewer heads. If the value heads have a different dimension, the values are
            exchanged in a separate all-to-all; otherwise all three tensors share one.
        group: the sequence-parallel ranks.

    Returns:
        query ``[batch, query heads / sp, local tokens * sp, head_dim]``; key and value with the heads that it uses.

    Raises:
        ValueError: see :class:`HeadPartition`.
    """
    heads = HeadPartition(query.shape[1], key.shape[1], dist.get_world_size(group))
    queries, keys = heads.queries, heads.keys
    parts = [_by_rank(query, queries, None), _by_rank(key, keys, heads), _by_rank(value, keys, heads)]
    if key.shape[-1] == value.shape[-1]:
        query, key, value = _to_tokens(torch.cat(parts, dim=2), group).split([queries, keys, keys], dim=1)
    else:
        query, key = _to_tokens(torch.cat(parts[:2], dim=2), group).split([queries, keys], dim=1)
        value = _to_tokens(parts[2].contiguous(), group)
    used = heads.local_keys(dist.get_rank(group))
    if used is not None:  # ragged: the ranks' query heads do not use the key heads in equal runs
        key, value = (torch.cat([tensor[:, i : i + 1] for i in used], dim=1) for tensor in (key, value))
    return query, key, value


def gather_heads(result: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's heads of all tokens -> all heads of this rank's tokens: reverses :func:`scatter_heads`. Collective.

    ``[batch, heads / sp, local tokens * sp, head_dim] -> [batch, heads, local tokens, head_dim]``.
    """
    sp = dist.get_world_size(group)
    parts = result.unflatten(2, (sp, -1)).movedim(2, 0).contiguous()  # [sp, batch, heads / sp, local tokens, dim]
    received: torch.Tensor = _Exchange.apply(parts, group)
    return received.movedim(0, 1).flatten(1, 2)


def _by_rank(tensor: torch.Tensor, count: int, heads: HeadPartition | None) -> torch.Tensor:
    """``[ranks, batch, count, tokens, dim]``: the heads for each rank; a view if no head goes to two ranks."""
    if heads is None or heads.keys * heads.sp == heads.key_heads:
        return tensor.unflatten(1, (-1, count)).movedim(1, 0)
    return torch.stack([tensor[:, start : start + count] for start in heads.starts()])


def _to_tokens(parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Exchanges ``[ranks, batch, heads, tokens, dim]`` and concatenates the tokens of all ranks."""
    received: torch.Tensor = _Exchange.apply(parts, group)
    return received.movedim(0, 2).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts along the first dimension. It is its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(gradients[0].contiguous(), ctx.group), None

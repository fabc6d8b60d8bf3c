"""``AttentionBlocks``: which blocks of the attention matrix one context-parallel rank computes, and how.

The queries of one rank and the keys of another form a square of the attention matrix. Each square is divided on the
host, before any kernel runs: empty blocks are skipped, blocks without a mask or with the plain causal mask go to the
fastest kernels, and only the remaining blocks get an explicit mask. In zig-zag order
(:class:`~ds_trainer.parallel.sequence_plan.SequencePlan`) a causal mask without documents needs one kernel call per
square: a rank's square with itself is causal; with the keys of an earlier rank, all queries attend to the first half of
the keys; with the keys of a later rank, the second half of the queries attends to all keys. So all ranks compute the
same number of scores at every step of the ring. With a window or documents some steps are empty on all ranks, and
their keys need not be sent. This balance is the idea of striped attention (Brandon et al. 2023,
arXiv 2311.09431), here with contiguous chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch

from ds_trainer.parallel.sequence_plan import SequencePlan

MASK_ELEMENTS = 1 << 22  # larger masks are divided: 2048 queries x 2048 keys of one sequence


class BlockKind(Enum):
    """How the scores of a block are masked."""

    FULL = "every query attends to every key"
    CAUSAL = "query i of the block attends to keys 0..i of the block"
    MASKED = "by an explicit mask"


class Block(NamedTuple):
    """Queries ``[q0, q1)`` of one rank on keys ``[k0, k1)`` of another, as indices into each rank's tokens."""

    kind: BlockKind
    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def scores(self) -> int:
        """Scores that a kernel computes per head and sequence."""
        rows = self.q1 - self.q0
        return rows * (rows + 1) // 2 if self.kind is BlockKind.CAUSAL else rows * (self.k1 - self.k0)


class AttentionBlocks:
    """The blocks of one rank and the masks of the masked blocks.

    A query at position ``q`` of a sequence may attend to the key at position ``k`` if the key is valid, both belong to
    one document, and the key is in range: with ``causal``, ``k <= q`` and ``q - k < window``; otherwise
    ``|q - k| <= window``. (The window includes the query itself in the first case and extends to both sides in the
    second: the two conventions of transformers' ``masking_utils``.)

    Args:
        plan: which rank holds which tokens.
        cp_rank: the rank whose queries are computed.
        causal: whether tokens ignore later tokens.
        window: attention window in tokens; None for the full sequence.
        mask_elements: size above which a masked block is divided further.

    Attributes:
        of: the blocks for the keys of each context-parallel rank, indexed by rank.
        steps: in ascending order, the distances ``d`` for which a rank ``r`` may have blocks of the keys of rank
            ``r - d``; always with 0. The same on all ranks.
    """

    def __init__(
        self,
        plan: SequencePlan,
        cp_rank: int,
        causal: bool,
        window: int | None,
        mask_elements: int,
    ) -> None:
        # Does not hold the plan itself: plans are the weak keys of the cache of these objects.
        self._ranks = plan.layout.cp
        self._rank = cp_rank
        self._chunk = plan.length // (2 * self._ranks)
        self._causal = causal
        furthest = plan.length if window is None else window - 1 if causal else window
        self._distances = (0 if causal else -furthest, furthest)  # smallest and largest visible q - k
        self._mask_elements = mask_elements
        self._documents = plan.documents
        self.steps = self._needed_steps()
        self.of: tuple[tuple[Block, ...], ...] = tuple(
            tuple(_merged(self._divide(source, 0, self.tokens, 0, self.tokens))) for source in range(self._ranks)
        )

    @property
    def tokens(self) -> int:
        """Tokens of each sequence that a rank holds."""
        return 2 * self._chunk

    @property
    def scores(self) -> int:
        """Scores that this rank computes per head and sequence."""
        return sum(block.scores for blocks in self.of for block in blocks)

    def mask(self, source: int, block: Block, device: torch.device) -> torch.Tensor | None:
        """The mask of a block on the keys of rank ``source``; None if the block is not masked.

        Bool ``[batch or 1, 1, queries, keys]``, created on ``device`` without a synchronization.
        """
        if block.kind is not BlockKind.MASKED:
            return None
        q0, k0 = self._position(self._rank, block.q0), self._position(source, block.k0)  # masked blocks have no gap
        query = torch.arange(q0, q0 + block.q1 - block.q0, device=device).unsqueeze(1)
        key = torch.arange(k0, k0 + block.k1 - block.k0, device=device)
        nearest, furthest = self._distances
        mask = ((key <= query - nearest) & (key >= query - furthest))[None, None]
        if self._documents is not None:
            tokens = (q0, q0 + block.q1 - block.q0), (k0, k0 + block.k1 - block.k0)
            mask = mask & self._documents.same(*tokens, device).unsqueeze(1)
        return mask

    def _needed_steps(self) -> tuple[int, ...]:
        """From whole chunks alone, with the rule by which :meth:`_divide` leaves out a block: the same on all ranks."""
        chunks = 2 * self._ranks
        index = torch.arange(chunks)
        apart = (index[:, None] - index) * self._chunk  # of the first tokens of a chunk of queries and one of keys
        nearest, furthest = self._distances
        visible = (apart + self._chunk > nearest) & (apart - self._chunk < furthest)
        if self._documents is not None:
            visible &= self._documents.share(self._chunk)
        rank = torch.minimum(index, chunks - 1 - index)
        queries, keys = visible.nonzero(as_tuple=True)
        return tuple(sorted({0, *((rank[queries] - rank[keys]) % self._ranks).tolist()}))

    # -- dividing -------------------------------------------------------------------------------------------------

    def _position(self, rank: int, token: int) -> int:
        """Sequence position of a rank's token."""
        chunk, offset = divmod(token, self._chunk)
        return (rank if chunk == 0 else 2 * self._ranks - 1 - rank) * self._chunk + offset

    def _divide(self, source: int, q0: int, q1: int, k0: int, k1: int) -> Iterator[Block]:
        """Yields the blocks of a rectangle, without its empty parts."""
        if q0 == q1 or k0 == k1:
            return
        kind = self._kind(source, q0, q1, k0, k1)
        if kind is None:
            return
        sequences = 1 if self._documents is None else self._documents.rows
        large = sequences * (q1 - q0) * (k1 - k0) > self._mask_elements
        gap = self._has_gap(self._rank, q0, q1) or self._has_gap(source, k0, k1)
        if kind is not BlockKind.MASKED or not (gap or (large and (q1 - q0) * (k1 - k0) > 1)):
            yield Block(kind, q0, q1, k0, k1)
            return
        q, k = (q0 + q1) // 2, (k0 + k1) // 2  # the first halves end where the first chunk does
        for rows in ((q0, q), (q, q1)):
            for columns in ((k0, k), (k, k1)):
                yield from self._divide(source, *rows, *columns)

    def _has_gap(self, rank: int, start: int, stop: int) -> bool:
        return self._position(rank, stop - 1) - self._position(rank, start) != stop - 1 - start

    def _kind(self, source: int, q0: int, q1: int, k0: int, k1: int) -> BlockKind | None:
        """The kind of a whole rectangle; None if it is empty. MASKED if in doubt."""
        first, last = self._position(self._rank, q0), self._position(self._rank, q1 - 1)
        first_key, last_key = self._position(source, k0), self._position(source, k1 - 1)
        smallest, largest = first - last_key, last - first_key
        nearest, furthest = self._distances
        if largest < nearest or smallest > furthest:
            return None
        full = largest <= furthest and smallest >= nearest
        # Gaps do not matter: a rank's tokens are in sequence order.
        triangle = self._causal and source == self._rank and (q0, q1) == (k0, k1) and largest <= furthest
        if self._documents is not None:
            same = self._documents.compare(self._ranges(self._rank, q0, q1), self._ranges(source, k0, k1))
            if same is None:
                return None
            full, triangle = full and same, triangle and same
        return BlockKind.FULL if full else BlockKind.CAUSAL if triangle else BlockKind.MASKED

    def _ranges(self, rank: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Sequence positions of a rank's tokens ``[start, stop)``, as one range or as two with a gap between them."""
        bounds = [start, self._chunk, stop] if self._has_gap(rank, start, stop) else [start, stop]
        return [(self._position(rank, begin), self._position(rank, end - 1) + 1) for begin, end in pairwise(bounds)]


def _merged(blocks: Iterable[Block]) -> list[Block]:
    """The same blocks, with adjacent full blocks merged."""
    blocks = list(blocks)
    full = [tuple(block[1:]) for block in blocks if block.kind is BlockKind.FULL]
    for _ in range(2):  # vertically first; then, with queries and keys swapped, horizontally
        merged: list[tuple[int, ...]] = []
        for a0, a1, b0, b1 in sorted(full, key=lambda block: (block[2], block[3], block[0])):
            if merged and merged[-1][2:] == (b0, b1) and merged[-1][1] == a0:
                merged[-1] = (merged[-1][0], a1, b0, b1)
            else:
                merged.append((a0, a1, b0, b1))
        full = [(b0, b1, a0, a1) for a0, a1, b0, b1 in merged]
    rest = [block for block in blocks if block.kind is not BlockKind.FULL]
    return sorted(rest + [Block(BlockKind.FULL, *block) for block in full], key=lambda block: block[1:])


_cache: weakref.WeakKeyDictionary[SequencePlan, dict[tuple[int, bool, int | None], AttentionBlocks]] = (
    weakref.WeakKeyDictionary()
)


def attention_blocks(plan: SequencePlan, cp_rank: int, causal: bool, window: int | None = None) -> AttentionBlocks:
    """The blocks of this rank, cached for all layers that use the plan."""
    of_plan = _cache.setdefault(plan, {})
    key = (cp_rank, causal, window)
    if key not in of_plan:
        of_plan[key] = AttentionBlocks(plan, cp_rank, causal, window, MASK_ELEMENTS)
    return of_plan[key]

"""``AttentionBlocks``: which blocks of the attention matrix one context-parallel rank computes, and how.

The tokens of a rank times those of a rank whose keys it holds are one square of the attention matrix. A square is
divided on the host, before any kernel runs: parts in which nobody may see anybody are left out, parts without any mask
or with the plain causal one go to the quickest kernels, and only what remains gets a mask. In zig-zag order
(:class:`~ds_trainer.parallel.sequence_plan.SequencePlan`) a causal mask without documents needs one call a square: the
own square is causal, of one from an earlier rank all queries see the first half of the keys, and of one from a later
rank the second half of the queries sees all keys. So all ranks compute the same number of scores at every step of the
ring. That balance is the idea of striped attention (Brandon et al. 2023, arXiv 2311.09431), with contiguous chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import torch

from ds_trainer.parallel.sequence_plan import SequencePlan

MASK_ELEMENTS = 1 << 22  # a mask larger than this is divided: 2048 queries x 2048 keys of one sequence


class BlockKind(Enum):
    """How the scores of a block are masked."""

    FULL = "every query sees every key"
    CAUSAL = "query i of the block sees keys 0..i of the block"
    MASKED = "by a mask"


class Block(NamedTuple):
    """Queries ``q0..q1`` of a rank on keys ``k0..k1`` of a rank (places among the tokens of each, ends excluded)."""

    kind: BlockKind
    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def scores(self) -> int:
        """Scores that a kernel computes for one head and sequence."""
        rows = self.q1 - self.q0
        return rows * (rows + 1) // 2 if self.kind is BlockKind.CAUSAL else rows * (self.k1 - self.k0)


class AttentionBlocks:
    """The blocks of one rank, and the masks of those that need one.

    A query at place ``q`` of a sequence may see the key at place ``k`` if that key is valid, both are of one document,
    and the place is near enough: causal ``k <= q``, and with a window ``q - k < window``; not causal
    ``|q - k| <= window``. (The window counts the query itself in the first case and both sides in the second: the two
    conventions of transformers' ``masking_utils``.)

    Args:
        plan: who holds which token.
        cp_rank: whose queries.
        causal: whether nobody sees later tokens.
        window: how far one sees, in tokens; None: the whole sequence.
        mask_elements: size above which a masked block is divided further.

    Attributes:
        of: the blocks for the keys of each context-parallel rank, by its number.
    """

    def __init__(
        self,
        plan: SequencePlan,
        cp_rank: int,
        causal: bool,
        window: int | None,
        mask_elements: int,
    ) -> None:
        # Not the plan itself: plans are the weak keys under which these objects are kept.
        self._ranks = plan.layout.cp
        self._rank = cp_rank
        self._chunk = plan.length // (2 * self._ranks)
        self._causal = causal
        furthest = plan.length if window is None else window - 1 if causal else window
        self._distances = (0 if causal else -furthest, furthest)  # of a query to the first and last key it sees
        self._mask_elements = mask_elements
        self._documents = _Documents.of(plan)
        self.of: tuple[tuple[Block, ...], ...] = tuple(
            tuple(_joined(self._divide(source, 0, self.tokens, 0, self.tokens))) for source in range(self._ranks)
        )

    @property
    def tokens(self) -> int:
        """Tokens of each sequence that a rank holds."""
        return 2 * self._chunk

    @property
    def scores(self) -> int:
        """Scores that this rank computes for one head and sequence."""
        return sum(block.scores for blocks in self.of for block in blocks)

    def mask(self, source: int, block: Block, device: torch.device) -> torch.Tensor | None:
        """The mask of a block on the keys of rank ``source``; None for a block that is not masked.

        Bool ``[batch or 1, 1, queries, keys]``, made on ``device`` without waiting for it.
        """
        if block.kind is not BlockKind.MASKED:
            return None
        q0, k0 = self._place(self._rank, block.q0), self._place(source, block.k0)  # masked blocks have no gap
        query = torch.arange(q0, q0 + block.q1 - block.q0, device=device).unsqueeze(1)
        key = torch.arange(k0, k0 + block.k1 - block.k0, device=device)
        nearest, furthest = self._distances
        mask = ((key <= query - nearest) & (key >= query - furthest))[None, None]
        if self._documents is not None:
            queries, keys = self._documents.on(device)
            of_queries, of_keys = queries[:, q0 : q0 + block.q1 - block.q0], keys[:, k0 : k0 + block.k1 - block.k0]
            mask = mask & (of_queries[:, None, :, None] == of_keys[:, None, None, :])
        return mask

    # -- dividing -------------------------------------------------------------------------------------------------

    def _place(self, rank: int, token: int) -> int:
        """Place in the sequence of a token of a rank."""
        chunk, rest = divmod(token, self._chunk)
        return (rank if chunk == 0 else 2 * self._ranks - 1 - rank) * self._chunk + rest

    def _divide(self, source: int, q0: int, q1: int, k0: int, k1: int) -> Iterator[Block]:
        """The blocks of a rectangle; what is left out, nobody sees."""
        if q0 == q1 or k0 == k1:
            return
        found = self._kind(source, q0, q1, k0, k1)
        if found is None:
            return
        sequences = 1 if self._documents is None else self._documents.sequences
        large = sequences * (q1 - q0) * (k1 - k0) > self._mask_elements
        gap = self._has_gap(self._rank, q0, q1) or self._has_gap(source, k0, k1)
        if found is not BlockKind.MASKED or not (gap or (large and (q1 - q0) * (k1 - k0) > 1)):
            yield Block(found, q0, q1, k0, k1)
            return
        q, k = (q0 + q1) // 2, (k0 + k1) // 2  # the first halves end where the first chunk does
        for rows in ((q0, q), (q, q1)):
            for columns in ((k0, k), (k, k1)):
                yield from self._divide(source, *rows, *columns)

    def _has_gap(self, rank: int, start: int, stop: int) -> bool:
        return self._place(rank, stop - 1) - self._place(rank, start) != stop - 1 - start

    def _kind(self, source: int, q0: int, q1: int, k0: int, k1: int) -> BlockKind | None:
        """What a rectangle is as a whole; None where it is empty. In doubt, it is masked."""
        first, last = self._place(self._rank, q0), self._place(self._rank, q1 - 1)
        first_key, last_key = self._place(source, k0), self._place(source, k1 - 1)
        smallest, largest = first - last_key, last - first_key
        nearest, furthest = self._distances
        if largest < nearest or smallest > furthest:
            return None
        near = largest <= furthest and smallest >= nearest
        # Whatever the gaps: the tokens of a rank are in the order of the sequence.
        triangle = self._causal and source == self._rank and (q0, q1) == (k0, k1) and largest <= furthest
        if self._documents is not None:
            same = self._documents.compare(self._runs(self._rank, q0, q1), self._runs(source, k0, k1))
            if same is None:
                return None
            near, triangle = near and same, triangle and same
        return BlockKind.FULL if near else BlockKind.CAUSAL if triangle else BlockKind.MASKED

    def _runs(self, rank: int, start: int, stop: int) -> list[slice]:
        """Places in the sequence of some tokens of a rank, as one run, or two with a gap between."""
        cuts = [start, self._chunk, stop] if self._has_gap(rank, start, stop) else [start, stop]
        return [slice(self._place(rank, begin), self._place(rank, end - 1) + 1) for begin, end in pairwise(cuts)]


class _Documents:
    """Documents and padding of all sequences of a batch, in the order of the sequence; ``[batch, length]`` each.

    Padding that nobody may attend to is, as a key, of a document that no query has.
    """

    def __init__(self, documents: torch.Tensor, valid: torch.Tensor | None) -> None:
        nobody = int(documents.min()) - 1
        self._queries = documents
        self._keys = documents if valid is None else documents.masked_fill(~valid, nobody)
        self._valid_keys = documents if valid is None else documents.masked_fill(~valid, int(documents.max()) + 1)
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of(cls, plan: SequencePlan) -> _Documents | None:
        """None where every key is valid and every sequence one document."""
        if plan.documents is None and plan.valid is None:
            return None
        documents = plan.documents
        if documents is None:
            assert plan.valid is not None
            documents = torch.zeros(plan.valid.shape, dtype=torch.int64)
        return cls(documents, plan.valid)

    @property
    def sequences(self) -> int:
        """Sequences of the batch."""
        return self._queries.shape[0]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Documents of the queries and of the keys on ``device``; copied once, without waiting for it."""
        if device not in self._on:
            tensors = (self._queries, self._keys)
            if device.type == "cuda":
                tensors = (self._queries.pin_memory(), self._keys.pin_memory())
            queries, keys = (tensor.to(device, non_blocking=True) for tensor in tensors)
            self._on[device] = queries, keys
        return self._on[device]

    def compare(self, queries: list[slice], keys: list[slice]) -> bool | None:
        """Whether all of these queries and keys are of one document in each sequence; None where no pair is of one."""
        lowest, highest = _range(self._queries, queries)
        lowest_key, highest_key = _range(self._keys, keys)
        lowest_valid, _ = _range(self._valid_keys, keys)
        if bool(((highest < lowest_valid) | (highest_key < lowest)).all()):
            return None
        return bool(((lowest == highest) & (lowest == lowest_key) & (highest == highest_key)).all())


def _range(tensor: torch.Tensor, runs: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest value of each row over some of its columns."""
    least, greatest = zip(*(torch.aminmax(tensor[:, run], dim=1) for run in runs), strict=True)
    return torch.stack(least).amin(0), torch.stack(greatest).amax(0)


def _joined(blocks: Iterable[Block]) -> list[Block]:
    """The same blocks, with full ones that lie side by side made one."""
    blocks = list(blocks)
    full = [tuple(block[1:]) for block in blocks if block.kind is BlockKind.FULL]
    for _ in range(2):  # below each other first; then, queries and keys exchanged, beside each other
        joined: list[tuple[int, ...]] = []
        for a0, a1, b0, b1 in sorted(full, key=lambda block: (block[2], block[3], block[0])):
            if joined and joined[-1][2:] == (b0, b1) and joined[-1][1] == a0:
                joined[-1] = (joined[-1][0], a1, b0, b1)
            else:
                joined.append((a0, a1, b0, b1))
        full = [(b0, b1, a0, a1) for a0, a1, b0, b1 in joined]
    rest = [block for block in blocks if block.kind is not BlockKind.FULL]
    return sorted(rest + [Block(BlockKind.FULL, *block) for block in full], key=lambda block: block[1:])


_made: weakref.WeakKeyDictionary[SequencePlan, dict[tuple[int, bool, int | None], AttentionBlocks]] = (
    weakref.WeakKeyDictionary()
)


def attention_blocks(plan: SequencePlan, cp_rank: int, causal: bool, window: int | None = None) -> AttentionBlocks:
    """The blocks of this rank; divided once for all layers that go through a plan."""
    of_plan = _made.setdefault(plan, {})
    key = (cp_rank, causal, window)
    if key not in of_plan:
        of_plan[key] = AttentionBlocks(plan, cp_rank, causal, window, MASK_ELEMENTS)
    return of_plan[key]

"""The division of the attention matrix on the host, without any process: exact cover, no waste, equal work."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.parallel.attention_blocks import AttentionBlocks, BlockKind, attention_blocks
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.parallel.sequence_plan import SequencePlan
from tests.support.attention import allowed_pairs, plan_of

LARGE = 1 << 30
CPU = torch.device("cpu")


@st.composite
def plans(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 2, 3, 4, 8)) -> tuple[SequencePlan, int]:
    """A plan with or without documents and padding, and the size of its batch."""
    cp, batch = draw(st.sampled_from(sizes)), draw(st.integers(1, 3))
    length = 2 * cp * draw(st.integers(1, 7))
    documents = valid = None
    if draw(st.booleans()):
        begins = st.lists(st.booleans(), min_size=length, max_size=length)
        documents = torch.tensor([draw(begins) for _ in range(batch)]).long().cumsum(1)
        if draw(st.booleans()):  # numbers in any order
            documents = (documents * 7 + draw(st.integers(-20, 20))) % 11
    if draw(st.booleans()):
        lengths = torch.tensor(draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch)))
        valid = torch.arange(length) < lengths[:, None]
        if draw(st.booleans()):  # padding on the left
            valid = valid.flip(1)
    return plan_of(ParallelLayout(cp, cp=cp), length, documents, valid), batch


def covered(plan: SequencePlan, batch: int, blocks: AttentionBlocks, cp_rank: int) -> torch.Tensor:
    """How often a rank computes each pair of positions: ``[batch, length, length]``."""
    count = torch.zeros(batch, plan.length, plan.length, dtype=torch.int64)
    queries = plan.context_positions(cp_rank)
    for source, of_source in enumerate(blocks.of):
        keys = plan.context_positions(source)
        for block in of_source:
            rows, columns = queries[block.q0 : block.q1], keys[block.k0 : block.k1]
            seen = torch.ones(1, len(rows), len(columns), dtype=torch.bool)
            mask = blocks.mask(source, block, CPU)
            assert (mask is None) == (block.kind is not BlockKind.MASKED)
            if block.kind is BlockKind.CAUSAL:
                assert len(rows) == len(columns)
                seen = seen.tril()
            elif mask is not None:
                seen = mask[:, 0]
            # (Position and document may exclude all pairs only together: such a block is masked.)
            assert seen.any() or plan.documents is not None, "an empty block is computed"
            count[:, rows[:, None], columns[None, :]] += seen.long()
    return count


@given(plans(), st.booleans(), st.one_of(st.none(), st.integers(1, 30)), st.sampled_from([1, 16, LARGE]))
def test_the_blocks_of_all_ranks_cover_every_allowed_pair_once(
    planned: tuple[SequencePlan, int], causal: bool, window: int | None, limit: int
) -> None:
    plan, batch = planned
    count = torch.zeros(batch, plan.length, plan.length, dtype=torch.int64)
    for cp_rank in range(plan.layout.cp):
        blocks = AttentionBlocks(plan, cp_rank, causal, window, limit)
        count += covered(plan, batch, blocks, cp_rank)
        for block in (block for of_source in blocks.of for block in of_source):
            small = (block.q1 - block.q0) * (block.k1 - block.k0) == 1
            assert block.kind is not BlockKind.MASKED or small or block.scores <= limit
    assert torch.equal(count, allowed_pairs(plan, batch, causal, window).long())


def test_control_keys_in_the_wrong_order_are_not_covered() -> None:
    """Negative control: keys in plain order instead of zig-zag are other keys."""

    class Plain(SequencePlan):
        def context_positions(self, cp_rank: int) -> torch.Tensor:
            return torch.arange(self.length).chunk(self.layout.cp)[cp_rank]

    plan = Plain(ParallelLayout(2, cp=2), 16)
    count = sum(covered(plan, 1, AttentionBlocks(plan, rank, True, None, LARGE), rank) for rank in range(2))
    assert not torch.equal(count, allowed_pairs(plan, 1, True, None).long())


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_causal_work_is_the_same_on_every_rank_and_at_every_step(cp: int) -> None:
    plan = SequencePlan(ParallelLayout(cp, cp=cp), 16 * cp)
    ranks = [AttentionBlocks(plan, rank, True, None, LARGE) for rank in range(cp)]
    assert {blocks.scores for blocks in ranks} == {16 * 17 // 2 + (cp - 1) * 16 * 8}
    for rank, blocks in enumerate(ranks):
        assert [len(of_source) for of_source in blocks.of] == [1] * cp  # one call of a kernel a step
        kinds = {source: of_source[0].kind for source, of_source in enumerate(blocks.of)}
        assert kinds.pop(rank) is BlockKind.CAUSAL
        assert set(kinds.values()) <= {BlockKind.FULL}
    assert sum(blocks.scores for blocks in ranks) == 16 * cp * (16 * cp + 1) // 2  # no score in vain


def test_without_a_causal_mask_each_step_is_one_block() -> None:
    plan = SequencePlan(ParallelLayout(4, cp=4), 64)
    assert AttentionBlocks(plan, 1, False, None, LARGE).of == (((BlockKind.FULL, 0, 16, 0, 16),),) * 4


def test_an_attention_window_skips_distant_blocks() -> None:
    plan = SequencePlan(ParallelLayout(4, cp=4), 64)
    near = AttentionBlocks(plan, 0, True, 4, LARGE)
    assert [bool(of_source) for of_source in near.of] == [True, True, False, False]
    assert near.scores < AttentionBlocks(plan, 0, True, None, LARGE).scores


@given(plans(), st.booleans(), st.one_of(st.none(), st.integers(1, 40)))
def test_steps_are_those_with_blocks_on_any_rank(
    drawn: tuple[SequencePlan, int], causal: bool, window: int | None
) -> None:
    """All ranks have the same, none is missing, and without documents none is in vain."""
    plan, _ = drawn
    cp = plan.layout.cp
    ranks = [AttentionBlocks(plan, rank, causal, window, LARGE) for rank in range(cp)]
    (steps,) = {blocks.steps for blocks in ranks}
    needed = {0} | {(rank - source) % cp for rank, own in enumerate(ranks) for source in range(cp) if own.of[source]}
    assert list(steps) == sorted(steps) and needed <= set(steps)
    if plan.documents is None:
        assert needed == set(steps)


def packed(cp: int, mean: int, seed: int, chunk: int = 1024) -> SequencePlan:
    """A row of documents of random lengths around ``mean``, exponentially distributed."""
    length = 2 * cp * chunk
    lengths = torch.empty(4 * length // mean + 8)
    lengths = lengths.exponential_(1 / mean, generator=torch.Generator().manual_seed(seed)).clamp(8, length).long()
    documents = torch.searchsorted(lengths.cumsum(0), torch.arange(length), right=True)[None]
    return plan_of(ParallelLayout(cp, cp=cp), length, documents)


@pytest.mark.parametrize(
    ("mean", "bound"),
    [(32, 1.1), (256, 2.1), (4096, 2.1)],
    ids=["many short documents", "a few per chunk", "longer than a chunk"],
)
def test_balance_of_packed_rows(mean: int, bound: float) -> None:
    """The rank with most scores, relative to the mean, in zig-zag order over four ranks.

    Short documents have equal work everywhere. With documents as long as a chunk, the rank that holds a long one has
    more to do than the others: up to about twice the mean.
    """
    worst = 0.0
    for seed in range(5):
        plan = packed(4, mean, seed)
        scores = [AttentionBlocks(plan, rank, True, None, 64 * 64).scores for rank in range(4)]
        worst = max(worst, 4 * max(scores) / sum(scores))
    assert worst < bound, worst


def test_documents_are_divided_until_blocks_are_uniform_or_small() -> None:
    documents = torch.arange(4).repeat_interleave(16)[None]
    plan = plan_of(ParallelLayout(1), 64, documents)
    coarse, fine = (AttentionBlocks(plan, 0, True, None, limit) for limit in (LARGE, 32 * 32))
    assert [block.kind for block in coarse.of[0]] == [BlockKind.MASKED]
    assert coarse.scores == 64 * 64
    assert [block.scores for block in fine.of[0]] == [32 * 32] * 2
    finest = AttentionBlocks(plan, 0, True, None, 16 * 16)
    assert {block.kind for block in finest.of[0]} == {BlockKind.CAUSAL}
    assert finest.scores == 4 * 16 * 17 // 2


@pytest.mark.parametrize("window", [1, 3, 8])
def test_windows_are_those_of_transformers(window: int) -> None:
    from transformers import masking_utils

    query, key = torch.arange(12)[:, None], torch.arange(12)[None, :]
    plan = SequencePlan(ParallelLayout(1), 12)
    for causal, name in ((True, "sliding_window_causal_mask_function"), (False, None)):
        made = getattr(masking_utils, name or "sliding_window_bidirectional_mask_function")(window)
        wanted = made(None, None, query, key).expand(12, 12)
        count = covered(plan, 1, AttentionBlocks(plan, 0, causal, window, LARGE), 0)
        assert torch.equal(count[0].bool(), wanted)
        assert torch.equal(allowed_pairs(plan, 1, causal, window)[0], wanted)


def test_layers_share_the_blocks_of_a_plan_and_they_are_freed_with_it() -> None:
    plan = plan_of(ParallelLayout(2, cp=2), 8, valid=torch.ones(1, 8, dtype=torch.bool))
    blocks = attention_blocks(plan, 1, True, 3)
    assert attention_blocks(plan, 1, True, 3) is blocks
    assert attention_blocks(plan, 1, True, None) is not blocks
    assert attention_blocks(plan, 0, True, 3) is not blocks
    reference = weakref.ref(blocks)
    del plan, blocks
    gc.collect()
    assert reference() is None

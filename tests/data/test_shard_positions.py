"""What a rank makes for its shard of a sequence is as long as the shard."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.live_tensors import LiveTensors
from ds_trainer.parallel.sequence_plan import SequencePlan
from tests.data.test_sequence_sharding import layout_of, sharder_for


@pytest.mark.parametrize("length", [65536, 65531])
def test_what_a_rank_makes_is_as_long_as_its_shard(length: int) -> None:
    """Positions, shifted labels and masks of the full sequence never exist; a byte a token if there is padding."""
    layout = layout_of(4, 4)
    sharder = sharder_for(layout)
    tokens = torch.randint(10, 60, (1, length))
    batch = {"input_ids": tokens, "labels": tokens}
    with LiveTensors() as live:
        shard, plan = sharder.shard(batch, 1, 2)
    assert set(shard) >= {"input_ids", "labels", "shift_labels", "position_ids"}
    assert (plan.documents is None) is (length == 65536)
    of_shard = 8 * plan.length // (layout.cp * layout.sp)
    assert live.peak < 12 * of_shard + (0 if plan.documents is None else 2.1 * plan.length), live.peak / of_shard


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_positions_of_ranks_are_parts_of_those_of_their_context_rank(cp: int, sp: int, times: int) -> None:
    layout = layout_of(cp, sp)
    plan = SequencePlan(layout, times * layout.length_multiple)
    for rank in range(cp):
        parts = [plan.positions(rank, part) for part in range(sp)]
        assert {len(part) for part in parts} == {plan.length // (cp * sp)}
        assert torch.equal(torch.cat(parts), plan.context_positions(rank))

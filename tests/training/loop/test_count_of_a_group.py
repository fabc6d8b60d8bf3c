"""The item count of ranks that hold different items: not that of all ranks, of which some hold the same."""

from __future__ import annotations

import pytest
import torch

from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.training.loop.item_count import ItemCount
from tests.support.pool import pool


def counted(overlap: bool) -> float:
    """Of four ranks, two and two hold the same items: 10 and 11 of them."""
    layout = ParallelLayout(4, tp=2)
    groups = parallel_groups(layout)
    local_items = torch.tensor(10 + groups.coordinates.dp)
    return float(ItemCount.of_all_ranks(local_items, overlap, groups.dp).exact())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_item_count_is_summed_over_the_group(overlap: bool) -> None:
    assert pool(4).run(counted, overlap) == [21.0] * 4

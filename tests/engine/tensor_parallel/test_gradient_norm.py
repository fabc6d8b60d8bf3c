"""The gradient norm of tensor-parallel ranks: slices of all of them, whole weights once; and where a slice lies."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.engine.tensor_parallel.slices import gradient_norm, tensor_parallel_slice
from ds_trainer.parallel.groups import parallel_groups
from ds_trainer.parallel.layout import ParallelLayout
from tests.support.pool import pool


def norm(replicated: list[float], partitioned: list[list[float]]) -> float:
    """Of a whole weight with these gradients on all ranks, and a sliced one with those of each rank."""
    groups = parallel_groups(ParallelLayout(2, tp=2))
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    parameters[1].tensor_model_parallel = True  # type: ignore[attr-defined]
    rank = groups.coordinates.tp
    parameters[0].grad = torch.tensor(replicated if len(replicated) == 2 else [replicated[rank], replicated[2]])
    parameters[1].grad = torch.tensor(partitioned[rank])
    return float(gradient_norm(parameters, groups))


def test_the_norm_adds_partitions_and_counts_replicated_weights_once() -> None:
    wanted = math.sqrt(3**2 + 4**2 + 1 + 4 + 9 + 16)
    assert pool(2).run(norm, [3.0, 4.0], [[1.0, 2.0], [3.0, 4.0]]) == pytest.approx([wanted] * 2)


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_non_finite_norm_on_one_rank_is_non_finite_on_all_ranks(lost: float) -> None:
    """Else one rank leaves the step out and the other makes it."""
    of_replicated = pool(2).run(norm, [1.0, lost, 4.0], [[1.0, 2.0], [3.0, 4.0]])  # a whole weight, on rank 1 alone
    of_partitioned = pool(2).run(norm, [3.0, 4.0], [[1.0, 2.0], [3.0, lost]])
    assert not any(map(math.isfinite, [*of_replicated, *of_partitioned]))


def slice_of_rank(tp_rank: int, **meta: Any) -> Any:
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    values = {"sub_param_sizes": None, "sub_param_shard_widths": None, "partition_sizes": None, **meta}
    return tensor_parallel_slice(SimpleNamespace(**{DS_AUTOTP_UC_META: values}), tp_rank)  # type: ignore[arg-type]


def test_the_partition_of_a_weight() -> None:
    partition = {"logical_shape": (5, 3), "partition_dim": 0, "partition_sizes": [3, 2]}
    assert [slice_of_rank(rank, **partition).bands for rank in (0, 1)] == [((0, 3),), ((3, 2),)]
    assert [len(slice_of_rank(rank, **partition)) for rank in (0, 1)] == [9, 6]


def test_the_partitions_of_a_fused_weight() -> None:
    """Queries, keys and values in one tensor: a rank has a band of each."""
    fused = {
        "logical_shape": (8, 2),
        "partition_dim": 0,
        "sub_param_sizes": [4, 2, 2],
        "sub_param_shard_widths": [[2, 2], [1, 1], [1, 1]],
    }
    assert slice_of_rank(0, **fused).bands == ((0, 2), (4, 1), (6, 1))
    assert slice_of_rank(1, **fused).bands == ((2, 2), (5, 1), (7, 1))
    with pytest.raises(ValueError, match="did not record how it partitioned"):
        slice_of_rank(0, logical_shape=(8, 2), partition_dim=0)

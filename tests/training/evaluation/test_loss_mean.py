"""The mean loss over all items: weighted, without dummies, without what is not finite where that is asked for."""

from __future__ import annotations

import math

import torch

from ds_trainer.training.evaluation.loss_mean import LossMean


def mean(*batches: tuple[float, int], filtered: bool = False, counts: bool = True) -> LossMean:
    found = LossMean(torch.device("cpu"), filtered, counts)
    for loss, items in batches:
        found.add(torch.tensor(loss), torch.tensor(items))
    return found


def test_batches_are_weighted_by_their_items() -> None:
    assert mean((1.0, 1), (4.0, 3)).result() == (3.25, 4)


def test_a_mean_over_no_items_counts_nothing() -> None:
    assert mean((2.0, 2), (math.nan, 0)).result() == (2.0, 2)


def test_the_mean_of_no_batches_is_none() -> None:
    assert mean().result() is None
    found = mean((math.nan, 0)).result()
    assert found is not None and math.isnan(found.mean) and found.items == 0


def test_non_finite_losses_are_left_out_if_requested() -> None:
    found = mean((1.0, 2), (math.inf, 4), filtered=True).result()
    assert found == (1.0, 6)
    found = mean((1.0, 2), (math.inf, 4)).result()
    assert found is not None and math.isinf(found.mean)
    only_nan = mean((math.nan, 4), filtered=True).result()
    assert only_nan is not None and math.isnan(only_nan.mean)


def test_one_rank_per_replica_counts() -> None:
    assert mean((1.0, 2), counts=False).result() is None

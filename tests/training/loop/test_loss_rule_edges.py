"""Borders of the loss rule: a first loss of zero, a correction, a subclass that never gets the count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer.training.loop.item_count import ItemCount
from ds_trainer.training.loop.loss_rule import ItemCounter, LossRule, accepts_item_count, loss_rule_of, shifts_labels


def rule(normalized: bool = True) -> LossRule:
    return LossRule(ItemCounter(["labels"], shifted=False), normalized)


def test_a_first_loss_of_zero_does_not_change_the_loss_rule() -> None:
    """Every micro-batch of the first step may be a dummy, or all its targets already learned."""
    one = rule()
    one.verify(torch.zeros(()), torch.tensor(4.0), lambda items: torch.zeros(()))
    assert (one.normalized, one.verified) == (True, True)


def test_a_graph_that_uses_the_count_is_not_computed_again() -> None:
    one, items = rule(), torch.tensor(4.0, requires_grad=True)

    def recompute(items: torch.Tensor) -> torch.Tensor:
        raise AssertionError("computed again")

    one.verify(torch.ones((), requires_grad=True) / items, items, recompute)
    assert (one.normalized, one.verified) == (True, True)


@pytest.mark.parametrize("total", [5, 40])
def test_an_estimate_is_corrected(total: int) -> None:
    """The loss was divided by the estimate; with the count it is divided by the count."""

    class Arrived:
        def wait(self) -> None:
            pass

    items = ItemCount(torch.tensor(20.0), torch.tensor(total), Arrived())  # type: ignore[arg-type]
    corrected = rule().contribution(torch.tensor(60.0) / items.divisor, None, items)
    assert float(corrected) == pytest.approx(60.0 / total)
    mean = rule(normalized=False).contribution(torch.tensor(3.0), torch.tensor(4), items)
    assert float(mean) == pytest.approx(3.0 * 4 / total)


class TakesTheCount(nn.Module):
    shifts_labels = True

    def forward(self, input_ids: Any, num_items_in_batch: Any = None) -> Any: ...


class TakesAnything(nn.Module):
    def forward(self, input_ids: Any, **options: Any) -> Any: ...


class Neither(nn.Module):
    accepts_loss_kwargs = False

    def forward(self, input_ids: Any, **options: Any) -> Any: ...


def without_the_count(model: Any, inputs: Any, return_outputs: bool = False) -> Any: ...


def with_the_count(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any: ...


def test_losses_that_divide_by_the_count_are_recognized() -> None:
    assert loss_rule_of(TakesTheCount(), ["labels"]).normalized
    assert loss_rule_of(TakesAnything(), ["labels"]).normalized
    assert not loss_rule_of(Neither(), ["labels"]).normalized
    assert loss_rule_of(Neither(), ["labels"], loss_function=True).normalized
    assert loss_rule_of(Neither(), ["labels"], smoothed=True).normalized
    assert not loss_rule_of(TakesTheCount(), ["labels"], compute_loss=without_the_count).normalized
    assert loss_rule_of(TakesTheCount(), ["labels"], compute_loss=with_the_count).normalized
    assert not accepts_item_count(without_the_count)


def test_a_model_can_declare_whether_it_shifts_labels() -> None:
    assert shifts_labels(TakesTheCount())
    assert not shifts_labels(TakesAnything())


def test_only_tokens_are_shifted() -> None:
    """A class for each sample is no sequence, also where the model shifts tokens."""
    count = ItemCounter(["labels"], shifted=True)
    assert int(count({"labels": torch.tensor([3, 4, -100])})) == 2
    assert int(count({"labels": torch.tensor([[3, 4, -100], [5, 6, 7]])})) == 3
    assert int(count({"labels": torch.rand(4, 3)})) == 4
    assert (
        int(count({"labels": torch.ones(2, 3, dtype=torch.int64), "shift_labels": torch.tensor([[1, -100, 2]])})) == 2
    )

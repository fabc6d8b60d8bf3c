"""The start-up proof compares the experts of the real model with whole ones, and names the layer that differs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from ds_trainer.engine.expert_parallel import mark_experts
from ds_trainer.parallel import expert_exchange
from ds_trainer.training.model import expert_division
from tests.support.expert_models import CONFIGURATIONS, maker
from tests.support.pool import RankFailure, pool
from tests.support.runs import train_and_report
from tests.training.test_expert_parallel import samples

all_to_all, product_of = expert_exchange._all_to_all, expert_division._product
backward = expert_exchange._Exchanged.backward


def a_token_less(rows: torch.Tensor, *sizes: Any) -> torch.Tensor:
    arrived = all_to_all(rows, *sizes)
    return torch.cat([torch.zeros_like(arrived[:1]), arrived[1:]])


def a_gradient_twice(context: Any, gradient: torch.Tensor) -> Any:
    return backward(context, gradient * 2)


def other_experts(parameter: Any, groups: Any) -> None:
    """The experts of the other rank, in the place of its own."""
    other = 1 - groups.experts.rank()
    with mock.patch.object(type(groups.experts), "rank", lambda group: other):
        mark_experts(parameter, groups)


def neighbors(config: Any) -> Callable[..., Any]:
    """Each row goes through the next expert."""
    product = product_of(config)
    return lambda module, rows, experts, weights: product(module, rows, (experts + 1) % module.num_experts, weights)


WRONG: dict[str, tuple[Any, str, Any, str]] = {
    "a token less": (expert_exchange, "_all_to_all", a_token_less, "results"),
    "other experts": (expert_division, "mark_experts", other_experts, "results"),
    "a gradient twice": (expert_exchange._Exchanged, "backward", staticmethod(a_gradient_twice), "gradients of tokens"),
    "neighbors": (expert_division, "_product", neighbors, "results"),
}


def _train(make: Any, directory: str, wrong: str, arguments: dict[str, Any]) -> None:
    values = dict(expert_parallel_size=2, per_device_train_batch_size=2, max_steps=1, self_test="never")
    with mock.patch.object(*WRONG[wrong][:3]) if wrong else nullcontext():
        train_and_report(make, samples, directory, **{**values, **arguments})


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_results_name_the_layer(wrong: str, tmp_path: Any) -> None:
    stage = len(wrong) % 2 * 2 + 1
    message = rf"in model\.layers\.0\.mlp\.experts the {WRONG[wrong][3]} differ by a relative .* Set expert_parallel"
    with pytest.raises(RankFailure, match=message):
        pool(2).run(_train, maker("qwen3_moe"), str(tmp_path), wrong, {"zero_stage": stage})


@pytest.mark.extended
@pytest.mark.parametrize("family", CONFIGURATIONS)
@pytest.mark.parametrize("stage", [2, 3])
def test_rounding_of_all_families_is_allowed(family: str, stage: int, tmp_path: Any) -> None:
    pool(2).run(_train, maker(family), str(tmp_path), "", {"zero_stage": stage, "bf16": True})

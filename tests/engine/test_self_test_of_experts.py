"""The self-test with divided experts passes, and notices a wrong factor, norm, slice or token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch

from ds_trainer.engine import self_test
from ds_trainer.engine.expert_parallel import mark_experts
from ds_trainer.engine.self_test import GradientReport
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.parallel import expert_exchange
from tests.engine.test_self_test import PRECISIONS, replaced, report
from tests.support.pool import pool


def divided_experts() -> list[GradientReport]:
    return [
        report(zero_stage=stage, expert_parallel_size=2, **precision)
        for stage in range(4)
        for precision in WITH_EXPERTS[stage]
    ]


WITH_EXPERTS = {stage: PRECISIONS if stage else PRECISIONS[:1] for stage in range(4)}


def test_the_self_test_passes_with_divided_experts() -> None:
    for reports in pool(4).run(divided_experts):
        assert [one.wrong for one in reports] == [()] * 7
        assert all(one.title.endswith(", ep 2") for one in reports)
        assert max(one.error for one in reports if one.precision == "fp32") < 1e-5


def a_factor(parameter: Any, groups: Any) -> None:
    mark_experts(parameter, groups)
    parameter.register_hook(lambda gradient: gradient * 2)  # both numbers of ranks, that divide and that replicate


def other_experts(parameter: Any, groups: Any) -> None:
    parameter.data = parameter.data.flip(0)
    mark_experts(parameter, groups)


def a_token_less(rows: torch.Tensor, *sizes: Any) -> torch.Tensor:
    arrived = all_to_all(rows, *sizes)
    return torch.cat([torch.zeros_like(arrived[:1]), arrived[1:]])


def norm_with_experts_twice(engine: TrainingEngine, norm: Callable[[TrainingEngine], float]) -> float:
    experts = expected_gradient(4, engine.deepspeed.global_steps - 1, 2)["mixture.weight"].norm().item()
    return float((norm(engine) ** 2 + experts**2) ** 0.5)


all_to_all, expected_gradient = expert_exchange._all_to_all, self_test.expected_gradient
WRONG_EXPERTS: dict[str, Callable[[], Any]] = {
    "a factor": lambda: replaced(self_test, "mark_experts", a_factor),
    "other experts": lambda: replaced(self_test, "mark_experts", other_experts),
    "a token less": lambda: replaced(expert_exchange, "_all_to_all", a_token_less),
    "experts counted twice": lambda: replaced(
        TrainingEngine, "grad_norm", partialmethod(norm_with_experts_twice, TrainingEngine.grad_norm)
    ),
}


def wrong_experts() -> dict[str, tuple[str, ...]]:
    found = {}
    for name, broken in WRONG_EXPERTS.items():
        with broken():
            found[name] = report(zero_stage=1, expert_parallel_size=2).wrong
    return found


def test_wrong_experts_are_noticed() -> None:
    for found in pool(4).run(wrong_experts):
        assert "the gradient of mixture.weight is 2 times the correct value" in "; ".join(found["a factor"])
        assert any("mixture.weight" in text for text in found["other experts"])
        assert any("mixture.weight" in text for text in found["a token less"])
        assert all("the norm of the gradient" in text for text in found["experts counted twice"])
        assert found["experts counted twice"]

"""Experts of a hand-written model join by an attribute: numbers are those of one process, files have all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer, TrainingArguments
from tests.support.compare import assert_equal, weight_distance
from tests.support.expert_models import VOCABULARY
from tests.support.oracle import Trajectory, train_plainly
from tests.support.pool import RankFailure, pool
from tests.support.runs import compatibility_of
from tests.training.test_expert_parallel import BATCH, CLIP, RATE, STEPS, samples

EXPERTS, HIDDEN, INNER = 4, 16, 8


class OwnExperts(nn.Module):
    """Two products with a bias for each expert, and a scale that all of them share."""

    divides_experts = True

    def __init__(self, power: float) -> None:
        super().__init__()
        self.num_experts, self.power = EXPERTS, power
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) * 0.2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.1)
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            which, place = (experts == expert).nonzero(as_tuple=True)
            inner = F.gelu((tokens[which] * self.scale) @ self.up[expert])
            rows = inner @ self.down[expert] + self.bias[expert]
            result = result.index_add(0, which, rows * weights[which, place, None] ** self.power)
        return result


class OwnMixture(nn.Module):
    """A language model of one layer."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), OwnExperts(power)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: Any = None) -> dict[str, Any]:
        hidden = self.embedding(input_ids)
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        logits = self.head(hidden + self.experts(tokens, chosen, weights).view_as(hidden))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def make(power: float = 1.0) -> OwnMixture:
    torch.manual_seed(0)
    return OwnMixture(power)


def _train(directory: str, power: float, resume: str | None, arguments: dict[str, Any]) -> Trajectory:
    values: dict[str, Any] = dict(max_steps=STEPS, optim="sgd", learning_rate=RATE, weight_decay=0.0, use_cpu=True)
    values |= dict(max_grad_norm=CLIP, logging_steps=1, save_steps=2, self_test="never", disable_tqdm=True)
    trainer = Trainer(make(power), TrainingArguments(directory, **values, **arguments), train_dataset=samples())
    trainer.train(resume_from_checkpoint=resume)
    report = compatibility_of(trainer)
    trainer.engine.close()
    return report


def run(ranks: int, directory: Path, power: float = 1.0, resume: str | None = None, **arguments: Any) -> Trajectory:
    arguments["per_device_train_batch_size"] = BATCH // ranks
    return pool(ranks).run(partial(_train, str(directory), power, resume, arguments))[0]


@pytest.mark.parametrize(("ranks", "experts", "stage"), [(2, 2, 1), (2, 2, 3), (4, 4, 2), (4, 2, 0)])
@pytest.mark.cases(1, rest="extended")
def test_numbers_are_those_of_one_process(ranks: int, experts: int, stage: int, tmp_path: Path) -> None:
    values: dict[str, Any] = dict(optimizer="sgd", learning_rate=RATE, weight_decay=0.0, clip=CLIP)
    wanted = train_plainly(make(), samples(), global_batch=BATCH, steps=STEPS, **values)
    found = run(ranks, tmp_path / "first", zero_stage=stage, expert_parallel_size=experts)
    assert_equal(found, wanted, 2e-6)
    resumed = run(1, tmp_path / "second", resume=str(tmp_path / "first" / "checkpoint-2"))
    assert weight_distance(resumed.weights, wanted.weights) <= 2e-6


def test_a_function_that_is_no_weighted_sum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"in experts the results differ by a relative .* Set expert_parallel_size=1"):
        run(2, tmp_path, power=2.0, zero_stage=1, expert_parallel_size=2)

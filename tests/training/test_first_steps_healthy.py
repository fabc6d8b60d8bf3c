"""Ties that broke, evaluation samples in the training data, frozen models are said; healthy runs say nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import ConfigError, Trainer, TrainingArguments
from tests.support.models import VOCABULARY, tiny_llama
from tests.support.pool import pool
from tests.training.test_first_steps import Classes, classes, rows, train


def warned(folder: str, make: str, given: dict[str, Any]) -> list[str]:
    """The warnings of a run of 20 steps."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    package = logging.getLogger("ds_trainer")
    package.addHandler(handler)
    try:
        KINDS[make](folder, given)
    finally:
        package.removeHandler(handler)
    return found


def untied(folder: str, given: dict[str, Any]) -> None:
    model: Any = tiny_llama(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    train(folder, model, **given)


def leaked(folder: str, given: dict[str, Any]) -> None:
    """Half of the evaluation's samples are training samples, without the padding that they have there."""
    data = rows()
    for row in data:
        row["attention_mask"] = torch.ones_like(row["labels"])
    padded = [{key: F.pad(row[key], (0, 3), value=-100 if key == "labels" else 0) for key in row} for row in data]
    known = [*data[:8], *({**row, "attention_mask": data[0]["attention_mask"]} for row in rows(8, seed=5))]
    values = dict(use_cpu=True, max_steps=20, per_device_train_batch_size=4, save_strategy="no", report_to="none")
    args = TrainingArguments(folder, **{**values, "eval_strategy": "steps", "eval_steps": 10, **given})
    Trainer(tiny_llama(), args, train_dataset=padded, eval_dataset=known).train()


def with_evaluation(folder: str, given: dict[str, Any]) -> None:
    values = dict(use_cpu=True, max_steps=20, per_device_train_batch_size=4, save_strategy="no", report_to="none")
    args = TrainingArguments(folder, **{**values, "eval_strategy": "steps", "eval_steps": 10, **given})
    Trainer(tiny_llama(tied=True), args, train_dataset=rows(), eval_dataset=rows(16, seed=5)).train()


class Experts(nn.Module):
    """Eight experts, of which the router only uses the two that fit a few tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids).mean(1)
        place = (input_ids[:, 0] % 2).tolist()
        hidden = torch.stack([torch.tanh(self.experts[n](row)) for n, row in zip(place, hidden, strict=True)])
        return {"loss": F.cross_entropy(self.head(hidden), labels % 3)}


class Adversaries(nn.Module):
    """A generator and a critic with one loss: the critic's gradient is turned around."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.generator, self.critic = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        real = self.embedding(input_ids).mean(1)
        made = self.generator(torch.randn_like(real))
        critic = F.softplus(self.critic(made.detach())).mean() + F.softplus(-self.critic(real.detach())).mean()
        frozen = F.linear(made, self.critic.weight.detach(), self.critic.bias.detach())
        return {"loss": critic + F.softplus(-frozen).mean() + 0.1 * (made - real).square().mean()}


class Prompted(nn.Module):
    """A frozen model with a few trained vectors before its input."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama().requires_grad_(False)
        self.prompt = nn.Parameter(0.1 * torch.randn(4, 32))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        inner: Any = self.model
        words = inner.get_input_embeddings()(input_ids)
        whole = torch.cat([self.prompt.expand(len(words), -1, -1), words], 1)
        ignored = torch.full((len(labels), 4), -100)
        return inner(inputs_embeds=whole, labels=torch.cat([ignored, labels], 1)).loss


class Distilled(nn.Module):
    """A student whose teacher is part of the model, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = tiny_llama(1), tiny_llama(0).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            wanted = self.teacher(input_ids=input_ids).logits.softmax(-1)
        found = self.student(input_ids=input_ids, labels=labels)
        divergence = F.kl_div(found.logits.log_softmax(-1), wanted, reduction="batchmean") / input_ids.shape[1]
        return {"loss": 0.5 * found.loss + 0.5 * divergence}


def lora(folder: str, given: dict[str, Any]) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    train(folder, tiny_llama(), peft_config=config, **{"learning_rate": 1e-3, **given})


def frozen_encoder(folder: str, given: dict[str, Any]) -> None:
    model = Classes()
    model.encoder.requires_grad_(False)
    train(folder, model, classes(), **given)


def few_words(folder: str, given: dict[str, Any]) -> None:
    """Most rows of the embedding are never used."""
    few = [{key: row[key] % 5 + 3 for key in row} for row in rows()]
    train(folder, tiny_llama(vocab_size=2048), few, **given)


KINDS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "untied": untied,
    "leaked": leaked,
    "evaluation": with_evaluation,
    "tied": lambda folder, given: train(folder, tiny_llama(tied=True), **given),
    "lora": lora,
    "frozen encoder": frozen_encoder,
    "adversaries": lambda folder, given: train(folder, Adversaries(), **given),
    "experts": lambda folder, given: train(folder, Experts(), classes(), **given),
    "prompt": lambda folder, given: train(folder, Prompted(), **given),
    "distilled": lambda folder, given: train(folder, Distilled(), **given),
    "few words": few_words,
}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("kind", "words"), [("untied", "are two tensors"), ("leaked", "are training samples")])
@pytest.mark.parametrize(("world", "given"), [(1, {}), (2, {"zero_stage": 3, "per_device_train_batch_size": 2})])
def test_broken_ties_and_leaked_samples(
    kind: str, words: str, world: int, given: dict[str, Any], tmp_path: Path
) -> None:
    first, *_ = pool(world).run(warned, str(tmp_path), kind, given)
    assert len(first) == 1 and words in first[0], first


HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS if kind not in ("untied", "leaked")},
    "tied, ZeRO 3": ("tied", {"zero_stage": 3}),
    "warm-up from 0": ("tied", {"warmup_steps": 15, "learning_rate": 1e-5}),
    "bf16": ("tied", {"bf16": True}),
    "bf16, ZeRO 2": ("few words", {"bf16": True, "zero_stage": 2}),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_silent(name: str, tmp_path: Path) -> None:
    kind, given = HEALTHY[name]
    [found] = pool(1).run(warned, str(tmp_path), kind, given)
    assert not found, found


@pytest.mark.parametrize("adapters", [False, True])
def test_a_model_of_which_nothing_is_trained(adapters: bool, tmp_path: Path) -> None:
    """As PeftModel.from_pretrained loads adapters unless it is told that they are trained."""
    from peft import LoraConfig, get_peft_model

    model = tiny_llama().requires_grad_(False)
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], inference_mode=True))
    with pytest.raises(ConfigError, match=r"^Nothing of \w+ is trained: .*" + ("is_trainable" if adapters else "")):
        train(tmp_path, model, zero_stage=3)

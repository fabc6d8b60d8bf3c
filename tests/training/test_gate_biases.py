"""Biases of gates that balance experts: those of one process of plain PyTorch, which counts the tokens of a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.model import expert_division
from ds_trainer.utils import distributed
from tests.support.compare import assert_equal
from tests.support.expert_models import maker
from tests.support.oracle import Trajectory, token_loss, train_plainly
from tests.support.pool import RankFailure, pool
from tests.support.runs import compatibility_of
from tests.training.test_expert_parallel import BATCH, CLIP, RATE, STEPS, samples

BIAS_RATE = 0.003  # with more, all ranks count the same signs
BIAS = "e_score_correction_bias"


def biases_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): b.clone() for name, b in model.named_buffers() if name.endswith(BIAS)}


class Balanced:
    """The oracle's loss, which balances the experts with the tokens of the step before."""

    def __init__(self, model: Any) -> None:
        self.gates = {name: gate for name, gate in model.named_modules() if BIAS in gate._buffers}
        self.loads: dict[str, torch.Tensor] = {}
        self.mask = torch.empty(0)
        for name in self.gates:
            experts = model.get_submodule(name.rpartition(".")[0]).experts
            experts.register_forward_pre_hook(partial(self.count, name))

    def count(self, name: str, _: Any, args: Any) -> None:
        self.loads[name] = torch.bincount(args[1][self.mask.flatten() != 0].flatten(), minlength=4)

    def update(self) -> None:
        for name, load in self.loads.items():
            self.gates[name]._buffers[BIAS] += BIAS_RATE * torch.sign(load.float().mean() - load)

    def __call__(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.update()
        self.mask = batch["attention_mask"]
        return token_loss(model, batch)


_oracles: dict[str, tuple[Trajectory, dict[str, torch.Tensor]]] = {}


def oracle(family: str, number: int | None = None) -> tuple[Trajectory, dict[str, torch.Tensor]]:
    key = f"{family} {number}"
    if key not in _oracles:
        model = maker(family)()
        loss = Balanced(model)
        values: dict[str, Any] = dict(optimizer="sgd", learning_rate=RATE, weight_decay=0.0, clip=CLIP, loss=loss)
        found = train_plainly(model, samples()[:number], global_batch=BATCH, steps=STEPS, **values)
        loss.update()
        _oracles[key] = found, biases_of(model)
    return _oracles[key]


def _train(
    make: Any,
    directory: str,
    arguments: dict[str, Any],
    resume: str | None = None,
    alone: bool = False,
    number: int | None = None,
) -> tuple[Trajectory, dict[str, torch.Tensor]]:
    values: dict[str, Any] = dict(
        use_cpu=True,
        max_steps=STEPS,
        optim="sgd",
        optim_args=f"gate_bias_rate={BIAS_RATE}",
        learning_rate=RATE,
        weight_decay=0.0,
        max_grad_norm=CLIP,
        logging_steps=1,
        save_strategy="no",
        self_test="never",
        disable_tqdm=True,
    )
    args = TrainingArguments(directory, **{**values, **arguments})
    trainer = Trainer(make(), args, train_dataset=samples()[:number])
    update, reduce = expert_division.GateBiases.update, distributed.all_reduce_sum

    def of_rank(biases: Any) -> None:
        with mock.patch.object(distributed, "all_reduce_sum", lambda *_, **__: None):
            update(biases)

    with mock.patch.object(expert_division.GateBiases, "update", of_rank if alone else update):
        trainer.train(resume_from_checkpoint=resume)
    assert distributed.all_reduce_sum is reduce
    report = compatibility_of(trainer), biases_of(trainer.model)
    trainer.engine.close()
    return report


LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "glm4_moe", {"zero_stage": 1, "expert_parallel_size": 2, "gradient_checkpointing": True}),
    (2, "glm4_moe", {"zero_stage": 3}),
    (1, "deepseek_v3", {"gradient_accumulation_steps": 2}),
    (4, "glm4_moe", {"zero_stage": 2, "expert_parallel_size": 4, "gradient_accumulation_steps": 2}),
    (2, "glm4_moe", {"zero_stage": 0, "context_parallel_size": 2}),
    (2, "glm4_moe", {"zero_stage": 1, "sequence_parallel_size": 2, "expert_parallel_size": 2}),
    (4, "glm4_moe", {"zero_stage": 1, "tensor_parallel_size": 2, "expert_parallel_size": 2}),
]


@pytest.mark.parametrize(("ranks", "family", "arguments"), LAYOUTS, ids=str)
@pytest.mark.cases(2, rest="extended")
def test_biases_are_those_of_one_process(ranks: int, family: str, arguments: dict[str, Any], tmp_path: Any) -> None:
    axes = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_size")
    per_step = ranks * arguments.get("gradient_accumulation_steps", 1)
    for axis in axes:
        per_step //= arguments.get(axis, 1)
    values = {**arguments, "per_device_train_batch_size": BATCH // per_step}
    wanted, biases = oracle(family)
    assert all(bias.unique().numel() > 1 for bias in biases.values())
    for found, own in pool(ranks).run(_train, maker(family), str(tmp_path), values):
        assert_equal(found, wanted, 2e-6)
        torch.testing.assert_close(own, biases, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 0, 2, 3])
@pytest.mark.cases(1, rest="extended")
def test_ranks_without_samples_in_the_last_step_of_an_epoch(stage: int, tmp_path: Any) -> None:
    """They have gradients of their experts, from tokens of others, and count no tokens of their own."""
    values = {"zero_stage": stage, "expert_parallel_size": 2, "per_device_train_batch_size": BATCH // 4}
    wanted, biases = oracle("glm4_moe", 26)
    for found, own in pool(4).run(_train, maker("glm4_moe"), str(tmp_path), values, None, False, 26):
        assert_equal(found, wanted, 2e-6)
        torch.testing.assert_close(own, biases, rtol=0, atol=1e-6)


def test_counts_of_one_rank_alone_are_noticed(tmp_path: Any) -> None:
    values = {"zero_stage": 1, "per_device_train_batch_size": BATCH // 2}
    reports = pool(2).run(_train, maker("glm4_moe"), str(tmp_path), values, None, True)
    biases = oracle("glm4_moe")[1]
    assert any(not torch.allclose(own[name], biases[name], atol=1e-6) for _, own in reports for name in biases)


def test_resumed_with_other_ranks(tmp_path: Path) -> None:
    values = {"zero_stage": 1, "expert_parallel_size": 2, "per_device_train_batch_size": BATCH // 2}
    saves = {**values, "save_strategy": "steps", "save_steps": 2}
    make = maker("glm4_moe")
    pool(2).run(_train, make, str(tmp_path / "first"), saves)
    found, own = pool(1).run(
        _train, make, str(tmp_path / "second"), {"per_device_train_batch_size": BATCH}, f"{tmp_path}/first/checkpoint-2"
    )[0]
    wanted, biases = oracle("glm4_moe")
    assert found.losses[2:] == pytest.approx(wanted.losses[2:], rel=2e-6)
    torch.testing.assert_close(own, biases, rtol=0, atol=1e-6)


def test_models_without_such_biases_are_refused(tmp_path: Any) -> None:
    with pytest.raises(RankFailure, match=r"gate_bias_rate=0\.003, but no gate of .* Remove gate_bias_rate\."):
        pool(1).run(_train, maker("qwen3_moe"), str(tmp_path), {})


@pytest.mark.parametrize("rate", ["0", "-1", "2", "nan", "true", "much"])
def test_rates_that_are_none_are_refused(rate: str, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"gate_bias_rate must be above 0 and at most 1, such as 0\.001"):
        TrainingArguments(str(tmp_path), optim_args=f"gate_bias_rate={rate}")

"""Schedules in real runs: the rates of every step, on one rank and two, are those that transformers' Trainer logs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.training.loop.step import StepRunner
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from tests.support.models import Regression, regression_rows
from tests.support.pool import pool

STEPS = 12
EVERY_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 3},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 4}, "warmup_steps": 0.25},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0}, "warmup_steps": 2},
    # Rates at which the loss first falls and then jumps about, so that both change them.
    "reduce_lr_on_plateau": {
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        **EVERY_STEP,
        "eval_on_start": True,
    },
    "greedy": {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.8, "min_lr": 0.01}, **EVERY_STEP},
}


def shared(name: str) -> dict[str, Any]:
    return dict(
        max_steps=STEPS,
        learning_rate=0.3,
        lr_scheduler_type=name,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        optim="sgd",
        max_grad_norm=0.0,
        **SCHEDULES.get(name, {}),
    )


def ours(output_dir: str, name: str, micro: int, trainer_class: Any = Trainer, **changes: Any) -> Trainer:
    arguments = {**shared(name), "per_device_train_batch_size": micro, **changes}
    args = TrainingArguments(output_dir, **arguments)
    return trainer_class(Regression(), args, train_dataset=regression_rows(24), eval_dataset=regression_rows(8, seed=1))


def logged(trainer: Any, name: str = "learning_rate") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def run(output_dir: str, name: str, micro: int, trainer_class: Any = Trainer, **changes: Any) -> list[float]:
    trainer = ours(output_dir, name, micro, trainer_class, **changes)
    resume = changes.get("resume_from_checkpoint")
    trainer.train(resume_from_checkpoint=resume)
    trainer.engine.close()
    return logged(trainer)


def reference(output_dir: str, name: str) -> list[float]:
    """transformers' Trainer over batches in our order."""
    import transformers

    rows = regression_rows(24)
    order = [
        index
        for epoch in range(4)
        for index in torch.randperm(24, generator=torch.Generator().manual_seed(42 + epoch)).tolist()
    ]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(range(len(order)))

    args = transformers.TrainingArguments(output_dir, per_device_train_batch_size=8, **shared(name))
    data = [rows[index] for index in order]
    trainer = InOrder(Regression(), args, train_dataset=data, eval_dataset=regression_rows(8, seed=1))
    trainer.train()
    return logged(trainer)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_logged_rates_are_those_of_transformers_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    (wanted,) = pool(1).run(reference, str(tmp_path / "theirs"), name)
    assert len(wanted) == STEPS and len(set(wanted)) > 3
    (alone,) = pool(1).run(run, str(tmp_path / "one"), name, 8)
    assert alone == pytest.approx(wanted, rel=1e-12)
    for found in pool(2).run(run, str(tmp_path / "two"), name, 4):
        assert found == alone


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 5


class Stopped(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, callbacks=[StopAt()])


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_a_resumed_run_continues_with_the_same_rates(name: str, stage: int, tmp_path: Path) -> None:
    saved: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "zero_stage": stage}
    uninterrupted = pool(2).run(partial(run, str(tmp_path / "whole"), name, 4, **saved))
    pool(2).run(partial(run, str(tmp_path / "parts"), name, 4, Stopped, **saved))
    resumed = pool(2).run(
        partial(
            run, str(tmp_path / "parts"), name, 4, resume_from_checkpoint=str(tmp_path / "parts/checkpoint-5"), **saved
        )
    )
    assert resumed == uninterrupted and len(set(uninterrupted[0][5:])) > 1


class OwnMetric(Trainer):
    """Ranks that measure something of their own."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_loss": float(len(self.state.log_history)) * (-1) ** distributed.rank()}


def test_all_ranks_follow_the_metric_of_rank_0(tmp_path: Path) -> None:
    first, second = pool(2).run(run, str(tmp_path), "reduce_lr_on_plateau", 4, OwnMetric)
    assert first == second and len(set(first)) > 3


class NoSuchMetric(Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"eval_los": 1.0}


def refused_in_the_run(output_dir: str) -> str:
    trainer = ours(output_dir, "greedy", 8, NoSuchMetric)
    with pytest.raises(ConfigError) as error:
        trainer.train()
    return str(error.value)


def test_a_missing_metric_is_reported(tmp_path: Path) -> None:
    (message,) = pool(1).run(refused_in_the_run, str(tmp_path))
    assert "the metric 'eval_loss'" in message and "It has eval_los. Did you mean 'eval_los'?" in message


class InItsOwnType(Regression):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x.to(self.layers[0].weight.dtype), labels)


def overflowing(output_dir: str, stage: int) -> tuple[list[float], list[bool]]:
    """bf16 with DeepSpeed's own check of gradients: one infinite loss, whose step it leaves out."""

    class Overflows(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("inf") if self.state.global_step == 4 else loss

    trainer = ours(
        output_dir,
        "linear",
        4,
        Overflows,
        bf16=True,
        zero_stage=stage,
        deepspeed={"bf16": {"enabled": True, "check_grad_overflow": True}},
    )
    trainer.model = trainer.model_wrapped = InItsOwnType()
    trainer._ds_trainer.losses.rule.verified = True  # its check would look at the infinite loss
    applied: list[bool] = []
    trainer._ds_trainer.build_engine = _noting(trainer, applied)  # type: ignore[method-assign]
    trainer.train()
    trainer.engine.close()
    return logged(trainer), applied


def _noting(trainer: Trainer, applied: list[bool]) -> Any:
    build = trainer._ds_trainer.build_engine

    def wrapped(steps: int) -> None:
        build(steps)
        step = trainer.engine.step

        def noted(**given: bool) -> bool:
            applied.append(step(**given))
            return applied[-1]

        trainer.engine.step = noted  # type: ignore[method-assign]

    return wrapped


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_skipped_step_does_not_advance_the_schedule(stage: int, tmp_path: Path) -> None:
    for rates, applied in pool(2).run(overflowing, str(tmp_path), stage):
        assert applied == [True] * 4 + [False] + [True] * (STEPS - 5)
        wanted = [0.3 * (STEPS - step) / STEPS for step in (0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10)]
        assert rates == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type=greedy follows a metric, but eval_strategy=no"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type=reduce_lr_on_plateau follows a metric"),
    ],
)
def test_a_schedule_without_a_metric(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments("out", **arguments)


def test_wrong_schedules_are_rejected_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'num_cycle' is not an argument"):
        ours(str(tmp_path), "cosine", 8, lr_scheduler_kwargs={"num_cycle": 1})
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handed = (optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=r"optimizers=\(..., ReduceLROnPlateau\) .* eval_strategy=no \(default\)"):
        Trainer(model, args, train_dataset=regression_rows(8), optimizers=handed)
    args = TrainingArguments(str(tmp_path), use_cpu=True, lr_scheduler_type="greedy", eval_strategy="epoch")
    several = {"a": regression_rows(8), "b": regression_rows(8)}
    with pytest.raises(ConfigError, match=r"several evaluation datasets \(a, b\).*'eval_a_loss'"):
        Trainer(model, args, train_dataset=regression_rows(8), eval_dataset=several)


def test_schedules_add_nothing_to_the_training_loop() -> None:
    """The loop asks once, not every step, how its schedule is stepped."""
    assert "steps_on_metric" not in StepRunner.run.__code__.co_names

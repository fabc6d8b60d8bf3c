"""Training steps written for transformers: the same class body trains alike under transformers.Trainer and ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_trainer import Trainer
from tests.accelerator.support import trainer_for
from tests.support.compare import relative, weight_distance
from tests.support.models import PlainLanguageModel, RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.pool import pool
from tests.support.runs import whole_weights


class ReferenceStep:
    """A ``training_step`` of the shape that transformers has: own loss scaling, ``accelerator.backward``."""

    def training_step(self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if not self.model_accepts_loss_kwargs or num_items_in_batch is None:
            loss = loss / self.current_gradient_accumulation_steps
        keywords = {"scale_wrt_gas": False} if self.accelerator.distributed_type == "DEEPSPEED" else {}
        self.accelerator.backward(loss, **keywords)
        return loss.detach()


class ShortStep:
    """A mean loss of the step's own, divided by nothing: DeepSpeed's backward divides by the accumulation."""

    def training_step(self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        loss = F.mse_loss(model(**inputs)[1], inputs["labels"])
        self.accelerator.backward(loss)
        return loss.detach() / self.args.gradient_accumulation_steps


class WrappedStep:
    """Adds nothing but a call: what it returns is the base class's."""

    def training_step(self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]


class MeanLoss:
    """A ``compute_loss`` that knows nothing of item counts."""

    def compute_loss(self: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, **ignored: Any) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class MeanStep(MeanLoss, ReferenceStep):
    pass


MODELS: dict[str, Any] = {"llama": tiny_llama, "mean": PlainLanguageModel, "regression": Regression}
STEPS = {step.__name__: step for step in (ReferenceStep, ShortStep, WrappedStep, MeanStep)}
SHARED: dict[str, Any] = dict(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=3,
    lr_scheduler_type="constant",
    weight_decay=0.0,
    optim="sgd",
    learning_rate=0.1,
    max_grad_norm=0.0,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)


def rows_for(model: str) -> Any:
    return regression_rows(32) if model == "regression" else RaggedTokens(32)


def accelerator_step(step: str, model: str, output_dir: str, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    from ds_trainer import TrainingArguments

    kind = type("Ours", (STEPS[step], Trainer), {})
    args = TrainingArguments(output_dir, zero_stage=stage, **SHARED)
    trainer = kind(MODELS[model](), args, train_dataset=rows_for(model))
    trainer.train()
    report = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], whole_weights(trainer)
    trainer.engine.close()
    return report


def transformers_step(step: str, model: str, output_dir: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    import transformers

    kind = type("Theirs", (STEPS[step], transformers.Trainer), {})
    args = transformers.TrainingArguments(output_dir, ddp_backend="gloo", **SHARED)
    trainer = kind(model=MODELS[model](), args=args, train_dataset=rows_for(model))
    if step == "ShortStep":  # on plain torch accelerate divides only by its own setting, which the Trainer leaves at 1
        trainer.accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


CASES = [
    ("ReferenceStep", "llama"),
    ("ReferenceStep", "mean"),
    ("MeanStep", "llama"),
    ("ShortStep", "regression"),
    ("WrappedStep", "llama"),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("step", "model"), CASES)
def test_the_same_step_trains_as_under_transformers(world: int, step: str, model: str, tmp_path: Any) -> None:
    reference = pool(world).run(transformers_step, step, model, str(tmp_path / "theirs"))[0]
    for stage in (0, 2) if world == 2 else (0,):
        losses, weights = pool(world).run(accelerator_step, step, model, str(tmp_path / "ours"), stage)[0]
        assert weight_distance(weights, reference[1]) < 1e-5
        assert relative(losses, reference[0]) < 1e-4  # transformers rounds what it logs


def ragged_step(output_dir: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    from ds_trainer import TrainingArguments

    kind = type("Ours", (ShortStep, Trainer), {})
    values = {**SHARED, "max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = kind(Regression(), TrainingArguments(output_dir, **values), train_dataset=regression_rows(1))
    trainer.train()
    report = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], whole_weights(trainer)
    trainer.engine.close()
    return report


def test_a_dummy_batch_counts_nothing_in_a_step_like_that_of_transformers(tmp_path: Any) -> None:
    """One sample on two ranks: the second rank works on a dummy, so half of the sample's gradient remains."""
    model = Regression()
    row = regression_rows(1)[0]
    loss = F.mse_loss(model(row["x"][None], row["labels"][None])[1], row["labels"][None])
    (loss / 2).backward()
    wanted = {name: (p - 0.1 * p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}
    losses, weights = pool(2).run(ragged_step, str(tmp_path))[0]
    assert weight_distance(weights, wanted) < 1e-5
    assert losses == pytest.approx([float(loss.detach()) / 2], rel=1e-4)


def test_backward_without_an_engine_is_an_error() -> None:
    from ds_trainer.utils.errors import ConfigError

    with pytest.raises(ConfigError, match="built by train"):
        trainer_for().accelerator.backward(torch.zeros((), requires_grad=True))

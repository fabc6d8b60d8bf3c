"""Members of the reference that concern training: each does what it says, on one rank and on two, under ZeRO too."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils.errors import ConfigError
from tests.support.compare import assert_equal
from tests.support.models import RaggedTokens, Regression, regression_rows, tiny_llama
from tests.support.pool import pool
from tests.support.runs import compatibility_of, train_and_report


def arguments(directory: Any, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        max_steps=3, learning_rate=1e-2, logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True
    )
    return TrainingArguments(str(directory), **{**values, **changes})


def job(directory: Any, cls: type[Trainer] = Trainer, changes: dict[str, Any] | None = None, **given: Any) -> Trainer:
    if "model_init" not in given:
        given.setdefault("model", Regression())
    return cls(args=arguments(directory, **(changes or {})), train_dataset=regression_rows(20), **given)


# -- questions about the optimizer -----------------------------------------------------------------------------------


def ask_optimizer(directory: str, stage: int) -> Any:
    """Rates and groups before and after training, on one of two ranks."""
    trainer = job(directory, changes={"zero_stage": stage, "weight_decay": 0.1, "lr_scheduler_type": "constant"})
    size = trainer.get_num_trainable_parameters()
    trainer.train()
    weight = trainer.get_optimizer_group("layers.0.weight")
    same = trainer.get_optimizer_group(dict(trainer.model.named_parameters())["layers.0.weight"])
    bias = trainer.get_optimizer_group("layers.2.bias")
    with pytest.raises(ConfigError, match=r"layers\.9"):
        trainer.get_optimizer_group("layers.9")
    answer = (
        *(size, trainer.get_num_trainable_parameters(), trainer.get_learning_rates()),
        *(weight["weight_decay"], bias["weight_decay"], same is weight, len(trainer.get_optimizer_group())),
    )
    trainer.engine.close()
    return answer


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_optimizer_queries(stage: int, tmp_path: Path) -> None:
    size = sum(p.numel() for p in Regression().parameters())
    for answer in pool(2).run(ask_optimizer, str(tmp_path), stage):
        assert answer == (size, size, [1e-2, 1e-2], 0.1, 0.0, True, 2)


def test_there_is_no_optimizer_before_training(tmp_path: Path) -> None:
    trainer = job(tmp_path)
    for question in (trainer.get_learning_rates, trainer.get_optimizer_group):
        with pytest.raises(ConfigError, match="no optimizer yet"):
            question()
    with pytest.raises(ConfigError, match="create_optimizer first"):
        trainer.create_scheduler(10)


def test_an_optimizer_created_before_training_is_used(tmp_path: Path) -> None:
    """A script may make both itself, look at them and change them: training takes them as they are."""
    trainer = job(tmp_path)
    trainer.create_optimizer_and_scheduler(num_training_steps=3)
    made, schedule = trainer.optimizer, trainer.lr_scheduler
    assert trainer.create_optimizer() is made and trainer.create_scheduler(3) is schedule
    trainer.train()
    assert trainer.optimizer is made and trainer.lr_scheduler is schedule
    assert schedule.last_epoch == 3


# -- optimizers handed in --------------------------------------------------------------------------------------------


def with_class(directory: str, stage: int, by_class: bool) -> Any:
    model = tiny_llama()
    kwargs = {"lr": 0.05, "momentum": 0.5}
    given: dict[str, Any] = (
        {"optimizer_cls_and_kwargs": (torch.optim.SGD, kwargs)}
        if by_class
        else {"optimizers": (torch.optim.SGD(model.parameters(), **kwargs), None)}
    )
    args = arguments(directory, zero_stage=stage, per_device_train_batch_size=2)
    trainer = Trainer(model, args, train_dataset=RaggedTokens(12), **given)
    trainer.train()
    report = compatibility_of(trainer)
    trainer.engine.close()
    return report


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_class_is_built_for_the_model(stage: int, tmp_path: Path) -> None:
    """Given as class and arguments, or made by the user: the same numbers, under ZeRO too."""
    by_class = pool(2).run(with_class, str(tmp_path / "a"), stage, True)[0]
    by_hand = pool(2).run(with_class, str(tmp_path / "b"), 0, False)[0]
    assert_equal(by_class, by_hand)


def test_an_optimizer_class_that_rejects_its_arguments_is_reported(tmp_path: Path) -> None:
    trainer = job(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1, "momentun": 0.5}))
    with pytest.raises(ConfigError, match=r"optimizer_cls_and_kwargs passed .*momentun"):
        trainer.train()


def second_training(directory: str, stage: int) -> str:
    model = Regression()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = job(directory, changes={"zero_stage": stage}, model=model, optimizers=(sgd, None))
    trainer.train()
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    finally:
        if trainer._ds_trainer.engines.training_or_none is not None:
            trainer.engine.close()
    return ""


def test_an_optimizer_over_other_tensors_is_rejected(tmp_path: Path) -> None:
    stranger = torch.optim.SGD(Regression(seed=1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="built for another model"):
        job(tmp_path, optimizers=(stranger, None)).train()
    assert second_training(str(tmp_path), stage=0) == ""
    for message in pool(2).run(second_training, str(tmp_path), 1):
        assert "an earlier train() has put ZeRO's partitions into it" in message


class MakesASchedule(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)


def test_a_schedule_created_besides_that_of_the_file_is_rejected(tmp_path: Path) -> None:
    file = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
    with pytest.raises(ConfigError, match="has a scheduler, but MakesASchedule has built a ConstantLR"):
        job(tmp_path, MakesASchedule, {"deepspeed": file}).train()


# -- the length of a run, and the contexts of a step -----------------------------------------------------------------


class Shorter(Trainer):
    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        *values, max_steps = super().set_initial_training_values(args, dataloader)
        return (*values, max_steps - 1)


def test_set_initial_training_values_is_used_by_the_loop(tmp_path: Path) -> None:
    changes = {"max_steps": -1, "num_train_epochs": 1.5, "gradient_accumulation_steps": 2}
    trainer = job(tmp_path, Shorter, {**changes, "per_device_train_batch_size": 4})
    values = Trainer.set_initial_training_values(trainer, trainer.args, trainer.get_train_dataloader())
    assert values == (2, 3, 20, 30, 8, 5, 5)
    assert trainer.num_examples(trainer.get_train_dataloader()) == 20
    assert trainer.get_total_train_batch_size(trainer.args) == 8
    assert (trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()) == (1, 1, 1)
    assert trainer.train().global_step == 4


class Contexts(Trainer):
    entered: list[str]

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def compute_loss_context_manager(self) -> Any:
        contexts = super().compute_loss_context_manager()

        @contextmanager
        def note() -> Any:
            self.entered.append("in")
            yield
            self.entered.append("out")

        contexts.enter_context(note())
        return contexts

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.entered.append(str(torch.is_autocast_enabled("cpu")))
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_the_contexts_of_a_step_are_entered(tmp_path: Path) -> None:
    trainer = job(tmp_path, Contexts)
    trainer.entered = []
    trainer.train()
    assert trainer.entered == ["in", "True", "out"] * 3


class LeavesEvaluationMode(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].eval()
        kwargs["model"].train(False)


class Modes(Trainer):
    modes: list[bool]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.modes.append(self.model.training)
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_every_step_trains_in_training_mode(tmp_path: Path) -> None:
    """A callback that generates a sample leaves the model in evaluation mode; dropout must not stay off."""
    trainer = job(tmp_path, Modes, callbacks=[LeavesEvaluationMode])
    trainer.modes = []
    trainer.train()
    assert trainer.modes == [True] * 3


# -- construction ----------------------------------------------------------------------------------------------------


def test_model_init_may_take_the_trial(tmp_path: Path) -> None:
    asked: list[Any] = []

    def make(trial: Any = None) -> nn.Module:
        asked.append(trial)
        return Regression()

    trainer = job(tmp_path, model_init=make)
    assert trainer.call_model_init("a trial") is not trainer.model
    assert asked == [None, "a trial"]


def two_arguments(trial: Any, size: int) -> nn.Module:
    return Regression()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "neither model nor model_init": ({"model": None}, "either a model or a model_init"),
    "both": ({"model_init": Regression}, "either a model or a model_init"),
    "a class for a model": ({"model": Regression}, "model is a type, not a torch.nn.Module"),
    "an unknown name of a model": ({"model": "no-such-model"}, "'no-such-model' is not a directory"),
    "model_init with two arguments": ({"model": None, "model_init": two_arguments}, "needs trial, size"),
    "model_init without a model": ({"model": None, "model_init": lambda: None}, "returned a NoneType"),
    "an optimizer alone": ({"optimizers": "adamw"}, "must be a pair"),
    "two optimizers": (
        {"optimizers": (object(), None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
        "are given",
    ),
    "an optimizer over a model to come": (
        {"model": None, "model_init": Regression, "optimizers": (object(), None)},
        "have the parameters of one model",
    ),
    "a collator that is no function": ({"data_collator": {"pad": True}}, "data_collator is a dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_construction_is_rejected_with_a_message(name: str, tmp_path: Path) -> None:
    given, message = WRONG[name]
    with pytest.raises(ConfigError) as error:
        Trainer(**{"model": Regression(), "args": arguments(tmp_path), **given})
    assert message in str(error.value)


def test_train_and_report_returns_full_weights(tmp_path: Path) -> None:
    """The attributes of the reference, before and after."""
    trainer = job(tmp_path)
    assert trainer.model_wrapped is trainer.model
    assert (trainer.is_in_train, trainer.place_model_on_device, trainer.is_model_parallel) == (False, False, False)
    trainer.train()
    assert trainer.model_wrapped is trainer.engine.deepspeed and trainer.model_wrapped.module is trainer.model
    assert trainer.is_in_train is False
    assert trainer.is_local_process_zero() and trainer.is_world_process_zero()
    assert train_and_report(Regression, lambda: regression_rows(20), str(tmp_path / "again")).weights


def in_half_precision(directory: str) -> list[float]:
    """Losses of a model that is fed floats, in bf16."""
    trainer = job(
        directory, changes={"bf16": True, "zero_stage": 1, "eval_strategy": "epoch"}, eval_dataset=regression_rows(6)
    )
    trainer.train()
    trainer.engine.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_floats_are_cast_to_the_precision_of_the_engine(tmp_path: Path) -> None:
    """A model of bf16 weights cannot multiply float32 inputs."""
    trainer = job(tmp_path / "fp32")
    trainer.train()
    wanted = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert pool(1).run(in_half_precision, str(tmp_path / "bf16"))[0] == pytest.approx(wanted, rel=0.03)


def test_a_batch_may_be_nested(tmp_path: Path) -> None:
    nested = {"a": [torch.ones(2), {"b": (torch.ones(2, dtype=torch.int64), "text")}], "c": 3}
    prepared = job(tmp_path)._prepare_inputs(nested)
    assert prepared["a"][1]["b"][1] == "text" and prepared["c"] == 3
    assert prepared["a"][0].equal(torch.ones(2)) and prepared["a"][1]["b"][0].dtype == torch.int64

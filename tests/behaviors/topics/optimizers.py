"""Optimizers and schedules: how they are made, replaced and read."""

from __future__ import annotations

from typing import Any

import torch

from tests.behaviors.api import Api, raised
from tests.support.models import Regression, tiny_llama

_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")


def _rates(trainer: Any) -> Any:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def _losses(trainer: Any) -> Any:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def create_optimizer_before_training(api: Api) -> Any:
    trainer = api.plain_trainer({"optim": "adamw_torch", "weight_decay": 0.1})
    optimizer = trainer.create_optimizer()
    groups = [
        [len(g["params"]), g["weight_decay"], g["lr"], list(g["betas"]), g["eps"]] for g in optimizer.param_groups
    ]
    return [trainer.optimizer is optimizer, type(optimizer).__name__, groups]


def create_optimizer_and_scheduler(api: Api) -> Any:
    trainer = api.plain_trainer({"optim": "adamw_torch"})
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    rates = []
    for _ in range(3):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return [type(trainer.lr_scheduler).__name__, rates]


def create_scheduler_returns_it(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.create_optimizer()
    schedule = trainer.create_scheduler(num_training_steps=10)
    return [schedule is trainer.lr_scheduler, schedule.get_last_lr()]


def optimizer_is_made_at_the_start_of_training(api: Api) -> Any:
    trainer = api.plain_trainer()
    return [trainer.optimizer, trainer.lr_scheduler]


def losses_of_every_optimizer(api: Api) -> Any:
    found = {}
    for name in _OPTIMIZERS:
        trainer = api.plain_trainer({"optim": name, "max_steps": 3})
        trainer.train()
        found[name] = _losses(trainer)
    return found


def optim_args(api: Api) -> Any:
    trainer = api.plain_trainer({"optim": "rmsprop", "optim_args": "momentum=0.9,alpha=0.5"})
    trainer.train()
    return _losses(trainer)


def class_and_arguments_of_an_optimizer(api: Api) -> Any:
    cls, keywords = api.Trainer.get_optimizer_cls_and_kwargs(api.arguments(optim="adamw_torch", learning_rate=0.1))
    return [cls.__name__, keywords]


def classes_of_optimizers(api: Api) -> Any:
    names = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
    return [api.Trainer.get_optimizer_cls_and_kwargs(api.arguments(optim=name))[0].__name__ for name in names]


def arguments_of_optimizers(api: Api) -> Any:
    names = ("adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor")
    return [api.Trainer.get_optimizer_cls_and_kwargs(api.arguments(optim=name))[1] for name in names]


def own_optimizer(api: Api) -> Any:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = api.plain_trainer(model=model, optimizers=(optimizer, None))
    trainer.train()
    return [_losses(trainer), _rates(trainer)]


def own_optimizer_and_schedule(api: Api) -> Any:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    trainer = api.plain_trainer(model=model, optimizers=(optimizer, schedule))
    trainer.train()
    return [_losses(trainer), _rates(trainer), trainer.lr_scheduler is schedule]


def own_optimizer_class(api: Api) -> Any:
    given = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
    trainer = api.plain_trainer(optimizer_cls_and_kwargs=given)
    trainer.train()
    return [_losses(trainer), _rates(trainer)]


def create_optimizer_of_a_subclass(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                head = [p for n, p in self.model.named_parameters() if ".2." in n]
                rest = [p for n, p in self.model.named_parameters() if ".2." not in n]
                groups = [{"params": head, "lr": 0.1}, {"params": rest}]
                self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate)
            return self.optimizer

    trainer = api.plain_trainer(base=lambda base: Mine)
    trainer.train()
    return [_losses(trainer), trainer.get_learning_rates()]


def create_optimizer_that_calls_super(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
            return super().create_optimizer(*args, **kwargs)

    trainer = api.plain_trainer(base=lambda base: Mine)
    trainer.train()
    return _losses(trainer)


def create_scheduler_of_a_subclass(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            chosen = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 0.5**step)
            return self.lr_scheduler

    trainer = api.plain_trainer(base=lambda base: Mine)
    trainer.train()
    return _rates(trainer)


def create_both_of_a_subclass(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)

    trainer = api.plain_trainer(base=lambda base: Mine)
    trainer.train()
    return [_losses(trainer), _rates(trainer)]


def decay_parameter_names(api: Api) -> Any:
    return api.plain_trainer(model=tiny_llama()).get_decay_parameter_names(tiny_llama())


def learning_rates_and_groups(api: Api) -> Any:
    trainer = api.plain_trainer({"weight_decay": 0.1})
    before = raised(trainer.get_learning_rates)
    trainer.train()
    group = trainer.get_optimizer_group(next(trainer.model.parameters()))
    return [before, trainer.get_learning_rates(), group["weight_decay"], len(trainer.get_optimizer_group())]


def trainable_parameters(api: Api) -> Any:
    trainer = api.plain_trainer()
    next(trainer.model.parameters()).requires_grad_(False)
    return trainer.get_num_trainable_parameters()


def frozen_parameters_do_not_change(api: Api) -> Any:
    model = Regression()
    first = next(model.parameters()).requires_grad_(False)
    before = first.detach().clone()
    trainer = api.plain_trainer(model=model)
    trainer.train()
    return [torch.equal(before, next(trainer.model.parameters()).detach()), _losses(trainer)]


def reduce_on_plateau(api: Api) -> Any:
    changes = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "accuracy",
        "max_steps": 5,
    }
    trainer = api.evaluated_trainer(changes, compute_metrics=lambda prediction: {"accuracy": 1.0})
    trainer.train()
    return [_rates(trainer), isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)]


def schedule_after_training(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.train()
    return [trainer.lr_scheduler.get_last_lr(), trainer.lr_scheduler.last_epoch, trainer._get_learning_rate()]


def weight_decay_changes_the_losses(api: Api) -> Any:
    trainer = api.plain_trainer({"weight_decay": 0.5, "optim": "adamw_torch"})
    trainer.train()
    return _losses(trainer)


def optimizer_state_after_training(api: Api) -> Any:
    trainer = api.plain_trainer({"optim": "adamw_torch"})
    trainer.train()
    held = trainer.optimizer.state_dict()
    return sorted(held), sorted(next(iter(held["state"].values())))


def optimizer_has_an_optimizer_inside(api: Api) -> Any:
    trainer = api.plain_trainer({"optim": "adamw_torch"})
    trainer.train()
    return type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__

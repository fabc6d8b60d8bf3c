"""The history of logs: keys, values, steps; what train() returns."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.behaviors.api import Api
from tests.support.models import Regression, regression_rows


def _plain_run(api: Api) -> Any:
    changes = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = api.evaluated_trainer(changes, compute_metrics=lambda prediction: {"accuracy": 0.5})
    return trainer, trainer.train()


def keys_of_a_training_log(api: Api) -> Any:
    trainer, _ = api.shared(_plain_run)
    wanted = {"loss", "grad_norm", "learning_rate", "epoch", "step"}
    return sorted(set(trainer.state.log_history[0]) & wanted)


def all_keys_of_a_training_log(api: Api) -> Any:
    trainer, _ = api.shared(_plain_run)
    return set(trainer.state.log_history[0])


def keys_of_an_evaluation_log(api: Api) -> Any:
    trainer, _ = api.shared(_plain_run)
    return set(next(entry for entry in trainer.state.log_history if "eval_loss" in entry)) - {"eval_items"}


def all_keys_of_an_evaluation_log(api: Api) -> Any:
    trainer, _ = api.shared(_plain_run)
    return set(next(entry for entry in trainer.state.log_history if "eval_loss" in entry))


def keys_of_the_last_log(api: Api) -> Any:
    trainer, _ = api.shared(_plain_run)
    return set(trainer.state.log_history[-1])


def values_of_the_logs(api: Api) -> Any:
    trainer, _ = api.shared(_plain_run)
    names = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def order_of_the_logs(api: Api) -> Any:
    trainer, _ = api.shared(_plain_run)
    wanted = ("loss", "eval_loss", "train_loss")
    return [next(name for name in wanted if name in entry) for entry in trainer.state.log_history]


def types_of_the_values(api: Api) -> Any:
    trainer, _ = api.shared(_plain_run)
    names = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    return {name: type(trainer.state.log_history[0][name]).__name__ for name in names}


def train_output_is_a_named_tuple(api: Api) -> Any:
    _, output = api.shared(_plain_run)
    steps, loss, metrics = output
    return [output._fields, steps, loss, output.global_step == steps, output.metrics is metrics]


def train_output_metrics(api: Api) -> Any:
    _, output = api.shared(_plain_run)
    return [set(output.metrics) - {"total_flos"}, output.metrics["train_loss"], output.metrics["epoch"]]


def speed_adds_up(api: Api) -> Any:
    _, output = api.shared(_plain_run)
    found = output.metrics
    samples = found["train_samples_per_second"] * found["train_runtime"]
    steps = found["train_steps_per_second"] * found["train_runtime"]
    return [round(samples), round(steps)]


def loss_between_two_logs_is_a_mean(api: Api) -> Any:
    trainer = api.plain_trainer({"logging_steps": 2})
    trainer.train()
    return [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]


def training_loss_is_the_mean_of_all_steps(api: Api) -> Any:
    return api.plain_trainer({"logging_steps": 3, "max_steps": 5}).train().training_loss


def log_adds_epoch_and_step(api: Api) -> Any:
    trainer = api.plain_trainer()
    mine = {"mine": 1.5}
    trainer.log(mine)
    return [trainer.state.log_history, mine]


def log_after_training(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.train()
    trainer.log({"mine": 1.5})
    return trainer.state.log_history[-1]


def log_can_be_overridden(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def log(self, logs: Any, start_time: Any = None) -> None:
            logs["twice"] = 2 * logs.get("loss", 0.0)
            super().log(logs, start_time)

    trainer = api.plain_trainer({"max_steps": 2}, base=lambda base: Mine)
    trainer.train()
    return [entry.get("twice") for entry in trainer.state.log_history]


def log_without_start_time_can_be_overridden(api: Api) -> Any:
    class Mine(api.Trainer):  # type: ignore[misc, name-defined]
        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "lr": 1.0}, *args, **kwargs)

    trainer = api.plain_trainer({"max_steps": 2}, base=lambda base: Mine)
    trainer.train()
    return [entry.get("lr") for entry in trainer.state.log_history]


def gradient_norm_is_before_clipping(api: Api) -> Any:
    trainer = api.plain_trainer({"max_grad_norm": 0.01})
    trainer.train()
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def gradient_norm_without_clipping(api: Api) -> Any:
    trainer = api.plain_trainer({"max_grad_norm": 0.0})
    trainer.train()
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def learning_rate_is_that_of_the_step(api: Api) -> Any:
    trainer = api.plain_trainer({"warmup_steps": 2})
    trainer.train()
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


class _SometimesNan(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        loss, prediction = super().forward(x, labels)
        self.calls += 1
        return (loss * math.nan if self.calls == 2 else loss), prediction


def a_loss_that_is_not_a_number_is_filtered(api: Api) -> Any:
    trainer = api.plain_trainer({"logging_steps": 2}, model=_SometimesNan())
    trainer.train()
    return [math.isnan(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def token_speed_on_request(api: Api) -> Any:
    trainer = api.text_trainer({"include_num_input_tokens_seen": True, "max_steps": 2})
    output = trainer.train()
    first = trainer.state.log_history[0]
    return [
        first["num_input_tokens_seen"],
        "train_tokens_per_second" in first,
        "num_input_tokens_seen" in output.metrics,
    ]


def history_of_two_datasets(api: Api) -> Any:
    data = {"a": regression_rows(6, seed=1), "b": regression_rows(4, seed=2)}
    trainer = api.plain_trainer({"eval_strategy": "steps", "eval_steps": 4}, eval_dataset=data)
    trainer.train()
    return [
        {name: entry[name] for name in ("eval_a_loss", "eval_b_loss", "step") if name in entry}
        for entry in trainer.state.log_history
    ]

"""The methods of TrainingArguments that set groups of arguments."""

from __future__ import annotations

from typing import Any

from tests.behaviors.api import Api, raised


def _values(args: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def set_logging(api: Api) -> Any:
    args = api.arguments().set_logging(
        strategy="steps", steps=100, report_to="tensorboard", level="info", first_step=True
    )
    return _values(
        args, "logging_strategy", "logging_steps", "report_to", "log_level", "logging_first_step",
        "logging_nan_inf_filter", "log_on_each_node", "log_level_replica"
    )  # fmt: skip


def setters_return_the_same_object(api: Api) -> Any:
    args = api.arguments()
    return args.set_training().set_save(strategy="no") is args


def zero_steps_are_refused(api: Api) -> Any:
    args = api.arguments()
    setters = (args.set_save, args.set_logging, args.set_evaluate)
    return [raised(setter, strategy="steps", steps=0) for setter in setters]


def set_evaluate_with_its_default_delay_can_train(api: Api) -> Any:
    trainer = api.evaluated_trainer()
    trainer.args.set_evaluate(strategy="steps", steps=2, batch_size=4, delay=0)
    trainer.train()
    return [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]

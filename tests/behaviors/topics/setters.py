"""The methods of TrainingArguments that set groups of arguments."""

from __future__ import annotations

from typing import Any

from tests.behaviors.api import Api, raised


def _values(args: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def set_training(api: Api) -> Any:
    args = api.arguments().set_training(learning_rate=1e-4, batch_size=32, num_epochs=2, weight_decay=0.1, seed=1)
    return _values(
        args, "do_train", "learning_rate", "per_device_train_batch_size", "num_train_epochs", "weight_decay", "seed",
        "max_steps", "gradient_accumulation_steps", "gradient_checkpointing"
    )  # fmt: skip


def set_evaluate(api: Api) -> Any:
    args = api.arguments().set_evaluate(strategy="steps", steps=100, batch_size=4, accumulation_steps=2, loss_only=True)
    return _values(
        args, "do_eval", "eval_strategy", "eval_steps", "per_device_eval_batch_size", "eval_accumulation_steps",
        "prediction_loss_only"
    )  # fmt: skip


def set_testing(api: Api) -> Any:
    args = api.arguments().set_testing(batch_size=32, loss_only=True)
    return _values(args, "do_predict", "per_device_eval_batch_size", "prediction_loss_only")


def set_save(api: Api) -> Any:
    args = api.arguments().set_save(strategy="steps", steps=100, total_limit=3, on_each_node=True)
    return _values(args, "save_strategy", "save_steps", "save_total_limit", "save_on_each_node")


def set_logging(api: Api) -> Any:
    args = api.arguments().set_logging(
        strategy="steps", steps=100, report_to="tensorboard", level="info", first_step=True
    )
    return _values(
        args, "logging_strategy", "logging_steps", "report_to", "log_level", "logging_first_step",
        "logging_nan_inf_filter", "log_on_each_node", "log_level_replica"
    )  # fmt: skip


def set_push_to_hub(api: Api) -> Any:
    args = api.arguments().set_push_to_hub("me/awesome", strategy="end", private_repo=True, always_push=True)
    return _values(
        args, "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_token"
    )


def set_optimizer(api: Api) -> Any:
    args = api.arguments().set_optimizer(name="adamw_torch", beta1=0.8, epsilon=1e-6, learning_rate=0.1, args="a=1")
    return _values(
        args, "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "learning_rate", "weight_decay", "optim_args"
    )


def set_lr_scheduler(api: Api) -> Any:
    args = api.arguments().set_lr_scheduler(name="cosine", warmup_steps=0.05, num_epochs=4)
    return _values(args, "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps")


def set_dataloader(api: Api) -> Any:
    args = api.arguments().set_dataloader(train_batch_size=16, eval_batch_size=64, drop_last=True, sampler_seed=5)
    return _values(
        args, "per_device_train_batch_size", "per_device_eval_batch_size", "dataloader_drop_last", "data_seed",
        "dataloader_num_workers", "ignore_data_skip", "auto_find_batch_size"
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

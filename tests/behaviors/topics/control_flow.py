"""The control object: what a callback can start, stop and skip, and when the run ends."""

from __future__ import annotations

from typing import Any

from tests.behaviors.api import Api


def _steering(api: Api, event: str, act: Any) -> Any:
    def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        act(state, control)
        return control

    return type("Steering", (api.TrainerCallback,), {event: method})()


def _steps(trainer: Any, key: str) -> list[Any]:
    return [entry["step"] for entry in trainer.state.log_history if key in entry]


def _run(api: Api, event: str, act: Any, **changes: Any) -> Any:
    trainer = api.evaluated_trainer({"max_steps": 6, **changes}, callbacks=[_steering(api, event, act)])
    output = trainer.train()
    saved = [name for name in api.files() if name.startswith("checkpoint")]
    return [output.global_step, trainer.state.epoch, _steps(trainer, "loss"), _steps(trainer, "eval_loss"), saved]


def stop_after_a_step(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_training_stop = state.global_step >= 3

    return _run(api, "on_step_end", act)


def stop_in_on_log(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        if state.log_history[-1].get("step") == 2:
            control.should_training_stop = True

    return _run(api, "on_log", act)


def stop_in_on_evaluate(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_training_stop = True

    return _run(api, "on_evaluate", act, eval_strategy="steps", eval_steps=2)


def stop_in_on_save(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_training_stop = True

    return _run(api, "on_save", act, save_strategy="steps", save_steps=2)


def stop_in_on_step_begin(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_training_stop = state.global_step == 2

    return _run(api, "on_step_begin", act)


def stop_in_on_epoch_end(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_training_stop = True

    return _run(api, "on_epoch_end", act)


def stop_set_in_on_train_begin(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_training_stop = True

    return _run(api, "on_train_begin", act)


def end_an_epoch(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_epoch_stop = state.global_step == 2

    return _run(api, "on_step_end", act, max_steps=-1, num_train_epochs=2)


def evaluate_now(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_evaluate = state.global_step == 3

    return _run(api, "on_step_end", act)


def save_now(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_save = state.global_step in (1, 3)

    return _run(api, "on_step_end", act)


def log_now(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_log = state.global_step == 4

    return _run(api, "on_step_end", act, logging_steps=6)


def do_not_save(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_save = False

    return _run(api, "on_step_end", act, save_strategy="steps", save_steps=2)


def do_not_evaluate(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_evaluate = False

    return _run(api, "on_step_end", act, eval_strategy="steps", eval_steps=2)


def evaluate_at_the_end_of_an_epoch(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_evaluate = True

    return _run(api, "on_epoch_end", act)


def save_at_the_end_of_an_epoch(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_save = True

    return _run(api, "on_epoch_end", act)


def save_in_on_evaluate(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_save = True

    return _run(api, "on_evaluate", act, eval_strategy="steps", eval_steps=3)


def evaluate_in_on_log(api: Api) -> Any:
    def act(state: Any, control: Any) -> None:
        control.should_evaluate = "loss" in state.log_history[-1] and state.global_step == 2

    return _run(api, "on_log", act)


def evaluation_before_the_first_step(api: Api) -> Any:
    trainer = api.evaluated_trainer({"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2})
    trainer.train()
    return [_steps(trainer, "eval_loss"), [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]]


def delayed_evaluations(api: Api) -> Any:
    by_steps = api.evaluated_trainer({"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3, "max_steps": 5})
    by_steps.train()
    by_epochs = api.evaluated_trainer(
        {"eval_strategy": "epoch", "eval_delay": 2, "max_steps": -1, "num_train_epochs": 3}
    )
    by_epochs.train()
    return [_steps(by_steps, "eval_loss"), _steps(by_epochs, "eval_loss")]


def the_last_step_is_evaluated_and_saved(api: Api) -> Any:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    trainer = api.evaluated_trainer(changes)
    trainer.train()
    return [_steps(trainer, "eval_loss"), [name for name in api.files() if name.startswith("checkpoint")]]


def the_last_step_is_logged(api: Api) -> Any:
    trainer = api.plain_trainer({"logging_steps": 2, "max_steps": 5})
    trainer.train()
    return _steps(trainer, "loss")


def a_share_of_the_steps(api: Api) -> Any:
    trainer = api.evaluated_trainer(
        {"logging_steps": 0.3, "eval_strategy": "steps", "eval_steps": 0.5, "max_steps": 10, "save_strategy": "no"}
    )
    trainer.train()
    return [_steps(trainer, "loss"), _steps(trainer, "eval_loss")]


def the_first_step_is_logged_on_request(api: Api) -> Any:
    trainer = api.plain_trainer({"logging_steps": 3, "logging_first_step": True, "max_steps": 6})
    trainer.train()
    return _steps(trainer, "loss")


def logging_by_epochs(api: Api) -> Any:
    trainer = api.plain_trainer({"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2})
    trainer.train()
    return [[entry["step"], entry["epoch"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]


def no_logging(api: Api) -> Any:
    trainer = api.plain_trainer({"logging_strategy": "no"})
    trainer.train()
    return [sorted(entry)[:2] for entry in trainer.state.log_history], len(trainer.state.log_history)


def a_part_of_an_epoch(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 1.5})
    output = trainer.train()
    return [output.global_step, trainer.state.epoch, trainer.state.max_steps, trainer.state.num_train_epochs]


def max_steps_win_over_epochs(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": 6, "num_train_epochs": 1})
    output = trainer.train()
    return [output.global_step, trainer.state.epoch, trainer.state.num_train_epochs]


def training_twice_starts_at_step_zero(api: Api) -> Any:
    trainer = api.plain_trainer()
    first, second = trainer.train(), trainer.train()
    return [first.global_step, second.global_step, len(trainer.state.log_history), second.training_loss]


def incomplete_last_accumulation(api: Api) -> Any:
    changes = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 2}
    trainer = api.plain_trainer({**changes, "gradient_accumulation_steps": 3})
    output = trainer.train()
    return [output.global_step, trainer.state.epoch, [e["loss"] for e in trainer.state.log_history if "loss" in e]]

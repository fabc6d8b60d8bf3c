"""TrainerState: its values before, during and after a run, and its file."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tests.behaviors.api import Api

_NAMES = (
    *("epoch", "global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
    *("num_train_epochs", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step"),
    *("best_model_checkpoint", "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"),
    *("trial_name", "trial_params"),
)


def _values(state: Any) -> Any:
    return {name: getattr(state, name) for name in _NAMES}


def fields(api: Api) -> Any:
    return {item.name for item in dataclasses.fields(api.TrainerState)}


def defaults(api: Api) -> Any:
    return {**_values(api.TrainerState()), "history": api.TrainerState().log_history}


def before_training(api: Api) -> Any:
    return _values(api.plain_trainer().state)


def after_training(api: Api) -> Any:
    trainer = api.plain_trainer({"logging_steps": 2, "max_steps": 6})
    trainer.train()
    return _values(trainer.state)


def after_training_with_evaluations(api: Api) -> Any:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = api.evaluated_trainer({**changes, "load_best_model_at_end": True})
    trainer.train()
    return _values(trainer.state)


def during_training(api: Api) -> Any:
    seen: list[Any] = []

    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([state.global_step, state.epoch, state.max_steps, state.num_train_epochs])

    api.plain_trainer({"max_steps": 6}, callbacks=[Mine]).train()
    return seen


def steps_below_one_are_resolved(api: Api) -> Any:
    changes = {"logging_steps": 0.25, "save_strategy": "steps", "save_steps": 0.5, "max_steps": 6}
    trainer = api.plain_trainer(changes)
    trainer.train()
    return [trainer.state.logging_steps, trainer.state.save_steps, trainer.args.logging_steps]


def the_trainer_keeps_a_new_state(api: Api) -> Any:
    trainer = api.plain_trainer()
    before = trainer.state
    trainer.train()
    return before is trainer.state


def keys_of_the_file(api: Api) -> Any:
    trainer = api.plain_trainer()
    trainer.train()
    trainer.save_state()
    return sorted(json.loads((api.directory / "trainer_state.json").read_text()))


def stateful_callbacks_in_a_checkpoint(api: Api) -> Any:
    api.plain_trainer({"save_strategy": "steps", "save_steps": 2}).train()
    text = (api.directory / "checkpoint-2" / "trainer_state.json").read_text()
    return json.loads(text)["stateful_callbacks"]


def history_in_a_checkpoint(api: Api) -> Any:
    api.plain_trainer({"save_strategy": "steps", "save_steps": 2}).train()
    history = json.loads((api.directory / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    return [[entry["step"], entry["loss"]] for entry in history]


def round_trip_of_the_file(api: Api) -> Any:
    state = api.TrainerState(global_step=3, epoch=0.5, log_history=[{"loss": 1.0, "step": 1}], best_metric=0.25)
    path = str(api.directory / "state.json")
    state.save_to_json(path)
    again = api.TrainerState.load_from_json(path)
    return [again == state, again.global_step, again.log_history]


def epoch_of_several_epochs(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 2})
    trainer.train()
    return [entry["epoch"] for entry in trainer.state.log_history]


def best_metric_follows_the_evaluations(api: Api) -> Any:
    values = iter([0.2, 0.9, 0.5])
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 6,
        "metric_for_best_model": "accuracy",
    }
    trainer = api.evaluated_trainer(changes, compute_metrics=lambda prediction: {"accuracy": next(values)})
    trainer.train()
    state = trainer.state
    return [state.best_metric, state.best_global_step, state.best_model_checkpoint]


def best_metric_without_saving(api: Api) -> Any:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    trainer = api.evaluated_trainer(changes)
    trainer.train()
    return [trainer.state.best_metric, trainer.state.best_global_step, trainer.state.best_model_checkpoint]


def input_tokens_are_counted(api: Api) -> Any:
    trainer = api.text_trainer({"include_num_input_tokens_seen": True})
    trainer.train()
    masked = api.text_trainer({"include_num_input_tokens_seen": "non_padding"})
    masked.train()
    return [trainer.state.num_input_tokens_seen, masked.state.num_input_tokens_seen]


def operations_are_counted(api: Api) -> Any:
    trainer = api.text_trainer()
    trainer.train()
    return [trainer.state.total_flos > 0, trainer.state.log_history[-1]["total_flos"] == trainer.state.total_flos]


def control_defaults(api: Api) -> Any:
    return [vars(api.TrainerControl()), api.TrainerControl().state()]

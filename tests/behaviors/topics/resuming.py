"""train(resume_from_checkpoint=...): where it goes on, with the same or other arguments."""

from __future__ import annotations

from typing import Any

import torch

from tests.behaviors.api import Api
from tests.support.models import Regression, regression_rows

_SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def _history(trainer: Any) -> Any:
    return [[e["step"], e["loss"], e["learning_rate"]] for e in trainer.state.log_history if "loss" in e]


def _weights(trainer: Any) -> Any:
    return {name: float(p.detach().double().sum()) for name, p in trainer.model.named_parameters()}


def _first(api: Api, **changes: Any) -> None:
    api.plain_trainer({**_SAVING, **changes}).train()


def from_a_path(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer(_SAVING, model=Regression(seed=9))
    output = trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2"))
    return [output.global_step, _history(trainer), _weights(trainer)]


def from_the_last_one(api: Api) -> Any:
    _first(api, max_steps=4)
    trainer = api.plain_trainer(_SAVING, model=Regression(seed=9))
    output = trainer.train(resume_from_checkpoint=True)
    return [output.global_step, len(_history(trainer)), trainer.state.epoch]


def not_at_all(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer(_SAVING)
    return [trainer.train(resume_from_checkpoint=False).global_step, len(_history(trainer))]


def without_asking(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer(_SAVING)
    return [trainer.train().global_step, len(_history(trainer))]


def the_history_continues(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer(_SAVING)
    trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-4"))
    return [entry["step"] for entry in trainer.state.log_history]


def training_loss_of_a_resumed_run(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer(_SAVING)
    return trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-4")).training_loss


def the_step_in_on_train_begin(api: Api) -> Any:
    _first(api)
    seen: list[Any] = []

    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([state.global_step, state.epoch, state.max_steps])

    trainer = api.plain_trainer(_SAVING, callbacks=[Mine])
    trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-4"))
    return seen


def a_finished_run(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer(_SAVING)
    return trainer.train(resume_from_checkpoint=True).global_step


def more_steps(api: Api) -> Any:
    _first(api, lr_scheduler_type="constant", max_steps=4)
    trainer = api.plain_trainer({**_SAVING, "lr_scheduler_type": "constant", "max_steps": 8})
    output = trainer.train(resume_from_checkpoint=True)
    return [output.global_step, _history(trainer)]


def more_epochs(api: Api) -> Any:
    epochs = {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch", "lr_scheduler_type": "constant"}
    _first(api, **epochs)
    trainer = api.plain_trainer({**_SAVING, **epochs, "num_train_epochs": 2})
    output = trainer.train(resume_from_checkpoint=True)
    return [output.global_step, trainer.state.epoch, trainer.state.num_train_epochs]


def other_intervals(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer({**_SAVING, "logging_steps": 2, "save_steps": 3})
    trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2"))
    return [trainer.state.logging_steps, trainer.state.save_steps]


def in_the_middle_of_an_epoch(api: Api) -> Any:
    changes = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    api.plain_trainer({**_SAVING, **changes}).train()
    trainer = api.plain_trainer({**_SAVING, **changes}, model=Regression(seed=9))
    trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2"))
    return [_history(trainer), _weights(trainer)]


def without_skipping_data(api: Api) -> Any:
    _first(api, ignore_data_skip=True)
    trainer = api.plain_trainer({**_SAVING, "ignore_data_skip": True})
    return trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2")).global_step


def with_dropout(api: Api) -> Any:
    def build() -> Any:
        model = Regression()
        model.layers.append(torch.nn.Dropout(0.0))
        return model

    api.plain_trainer(_SAVING, model=build()).train()
    trainer = api.plain_trainer(_SAVING, model=build())
    trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2"))
    return _history(trainer)


def best_metric_is_kept(api: Api) -> Any:
    changes = {**_SAVING, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "accuracy"}
    values = iter([0.9, 0.2, 0.3, 0.1, 0.1, 0.1])
    compute = lambda prediction: {"accuracy": next(values)}  # noqa: E731
    api.evaluated_trainer(changes, compute_metrics=compute).train()
    trainer = api.evaluated_trainer(changes, compute_metrics=compute)
    trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-4"))
    return [trainer.state.best_metric, trainer.state.best_global_step]


def stateful_callback_is_restored(api: Api) -> Any:
    class Counter(api.TrainerCallback, api.ExportableState):  # type: ignore[misc, name-defined]
        def __init__(self, start: int = 0) -> None:
            self.start, self.count = start, 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.count += 1

        def state(self) -> Any:
            return {"args": {"start": self.start}, "attributes": {"count": self.count}}

    changes = {**_SAVING, "restore_callback_states_from_checkpoint": True}
    api.plain_trainer(changes, callbacks=[Counter(5)]).train()
    trainer = api.plain_trainer(changes, callbacks=[Counter(7)])
    trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2"))
    found = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Counter))
    return [found.count, found.start]


def stateful_callback_starts_anew_by_default(api: Api) -> Any:
    class Counter(api.TrainerCallback, api.ExportableState):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.count = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.count += 1

        def state(self) -> Any:
            return {"args": {}, "attributes": {"count": self.count}}

    api.plain_trainer(_SAVING, callbacks=[Counter()]).train()
    trainer = api.plain_trainer(_SAVING, callbacks=[Counter()])
    trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2"))
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, Counter)).count


def another_batch_size(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer({**_SAVING, "per_device_train_batch_size": 2})
    return trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2")).global_step


def speed_counts_the_resumed_steps_only(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer(_SAVING)
    found = trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2")).metrics
    return round(found["train_steps_per_second"] * found["train_runtime"])


def resumed_with_other_data(api: Api) -> Any:
    _first(api)
    trainer = api.plain_trainer(_SAVING, train_dataset=regression_rows(24))
    return trainer.train(resume_from_checkpoint=str(api.directory / "checkpoint-2")).global_step

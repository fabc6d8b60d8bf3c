"""Callbacks: which there are, how they are added and removed, what they receive, their order."""

from __future__ import annotations

from typing import Any

from tests.behaviors.api import Api

EVENTS = (
    *("on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin"),
    *("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end", "on_evaluate", "on_predict"),
    *("on_save", "on_log", "on_prediction_step"),
)


def _recorder(api: Api, record: Any, events: Any = EVENTS) -> Any:
    """A callback that calls ``record(event, args, state, control, kwargs)``."""

    def listen(event: str) -> Any:
        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record(event, args, state, control, kwargs)

        return method

    return type("Recorder", (api.TrainerCallback,), {event: listen(event) for event in events})()


def default_callbacks(api: Api) -> Any:
    trainer = api.plain_trainer()
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


def default_callbacks_with_a_progress_bar(api: Api) -> Any:
    trainer = api.plain_trainer({"disable_tqdm": False})
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


def callbacks_as_class_or_object(api: Api) -> Any:
    mine = api.subclass(api.TrainerCallback)
    other = type("Other", (api.TrainerCallback,), {})
    trainer = api.plain_trainer(callbacks=[mine, other()])
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


def callback_with_arguments(api: Api) -> Any:
    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def __init__(self, every: int) -> None:
            self.every = every

    trainer = api.plain_trainer(callbacks=[Mine(3)])
    return trainer.pop_callback(Mine).every


def add_pop_remove(api: Api) -> Any:
    trainer = api.plain_trainer()
    mine = api.subclass(api.TrainerCallback)
    one = mine()
    trainer.add_callback(one)
    trainer.add_callback(api.ProgressCallback)
    popped = trainer.pop_callback(mine)
    trainer.remove_callback(api.ProgressCallback)
    return [popped is one, trainer.pop_callback(mine), trainer.pop_callback(api.ProgressCallback)]


def pop_by_the_base_class(api: Api) -> Any:
    trainer = api.plain_trainer()
    return type(trainer.pop_callback(api.TrainerCallback)).__name__


def callback_list_is_text(api: Api) -> Any:
    mine = api.subclass(api.TrainerCallback)
    trainer = api.plain_trainer(callbacks=[mine])
    return "MyTrainerCallback" in trainer.callback_handler.callback_list.splitlines()


def the_same_class_twice_runs_twice(api: Api) -> Any:
    calls: list[str] = []

    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            calls.append("step")

    trainer = api.plain_trainer(callbacks=[Mine, Mine()])
    trainer.train()
    return len(calls)


def events_of_a_run(api: Api) -> Any:
    seen: list[Any] = []
    recorder = _recorder(api, lambda event, args, state, control, kwargs: seen.append((event, state.global_step)))
    changes = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    api.evaluated_trainer(changes, callbacks=[recorder]).train()
    return seen


def events_of_an_evaluation_alone(api: Api) -> Any:
    seen: list[Any] = []
    recorder = _recorder(api, lambda event, args, state, control, kwargs: seen.append(event))
    api.evaluated_trainer(callbacks=[recorder]).evaluate()
    return seen


def events_of_a_prediction_alone(api: Api) -> Any:
    seen: list[Any] = []
    recorder = _recorder(api, lambda event, args, state, control, kwargs: seen.append(event))
    trainer = api.evaluated_trainer(callbacks=[recorder])
    trainer.predict(trainer.eval_dataset)
    return seen


def keywords_of_every_event(api: Api) -> Any:
    seen: dict[str, Any] = {}

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.setdefault(event, sorted(kwargs))

    changes = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "gradient_accumulation_steps": 2,
    }
    api.evaluated_trainer(changes, callbacks=[_recorder(api, record)]).train()
    return seen


def objects_that_callbacks_receive(api: Api) -> Any:
    seen: list[Any] = []
    trainer: Any = None

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.extend(
            [
                args is trainer.args,
                state is trainer.state,
                control is trainer.control,
                kwargs["model"] is trainer.model,
                kwargs["processing_class"] is trainer.processing_class,
                kwargs["lr_scheduler"] is trainer.lr_scheduler,
                len(kwargs["train_dataloader"]),
                kwargs["eval_dataloader"],
            ]
        )

    trainer = api.plain_trainer({"max_steps": 1}, callbacks=[_recorder(api, record, ("on_step_end",))])
    trainer.train()
    return seen


def model_at_every_event_is_the_module(api: Api) -> Any:
    seen: set[str] = set()

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.add(type(kwargs["model"]).__name__)

    api.plain_trainer(callbacks=[_recorder(api, record)]).train()
    return seen


def logs_of_on_log(api: Api) -> Any:
    seen: list[Any] = []

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.append([kwargs["logs"].get("loss"), state.log_history[-1].get("loss"), "step" in kwargs["logs"]])

    api.plain_trainer(callbacks=[_recorder(api, record, ("on_log",))]).train()
    return seen


def metrics_of_on_evaluate(api: Api) -> Any:
    seen: list[Any] = []

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.append([kwargs["metrics"]["eval_loss"], kwargs["metrics"]["epoch"], kwargs["metrics"]["eval_accuracy"]])

    changes = {"eval_strategy": "steps", "eval_steps": 2}
    metrics = lambda prediction: {"accuracy": 0.5}  # noqa: E731
    trainer = api.evaluated_trainer(
        changes, callbacks=[_recorder(api, record, ("on_evaluate",))], compute_metrics=metrics
    )
    trainer.train()
    return seen


def a_callback_may_change_the_logs(api: Api) -> Any:
    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        kwargs["logs"]["mine"] = 1.0

    trainer = api.plain_trainer(callbacks=[_recorder(api, record, ("on_log",))])
    trainer.train()
    return ["mine" in entry for entry in trainer.state.log_history]


def a_callback_may_return_a_new_control(api: Api) -> Any:
    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return api.TrainerControl(should_training_stop=state.global_step == 2)

    trainer = api.plain_trainer(callbacks=[Mine])
    return trainer.train().global_step


def a_callback_with_its_own_event(api: Api) -> Any:
    calls: list[Any] = []

    class Mine(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_my_event(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            calls.append(sorted(set(kwargs) - {"model"})[-1])

    trainer = api.plain_trainer(callbacks=[Mine])
    mine = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Mine)]
    trainer.callback_handler.callbacks = mine
    trainer.callback_handler.call_event("on_my_event", trainer.args, trainer.state, trainer.control, x=1)
    return calls


def a_callback_added_in_on_train_begin(api: Api) -> Any:
    calls: list[str] = []

    class Late(api.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            calls.append("late")

    trainer: Any = None

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        trainer.add_callback(Late())

    trainer = api.plain_trainer(callbacks=[_recorder(api, record, ("on_train_begin",))])
    trainer.train()
    return len(calls)


def the_handler_takes_events(api: Api) -> Any:
    """As examples for question answering end their own evaluate()."""
    seen: list[Any] = []

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.append(kwargs["metrics"])

    trainer = api.plain_trainer(callbacks=[_recorder(api, record, ("on_evaluate",))])
    control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {"eval_f1": 1.0})
    return [seen, control is trainer.control]


def flow_without_the_default_callback(api: Api) -> Any:
    trainer = api.plain_trainer({"max_steps": -1, "num_train_epochs": 1})
    trainer.remove_callback(api.DefaultFlowCallback)
    return [trainer.train().global_step, len(trainer.state.log_history)]


def on_save_finds_the_checkpoint(api: Api) -> Any:
    seen: list[Any] = []

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        folder = api.directory / f"checkpoint-{state.global_step}"
        seen.append(
            [folder.is_dir(), (folder / "model.safetensors").is_file(), (folder / "trainer_state.json").is_file()]
        )
        (folder / "mine.txt").write_text("kept")

    changes = {"save_strategy": "steps", "save_steps": 2}
    api.plain_trainer(changes, callbacks=[_recorder(api, record, ("on_save",))]).train()
    return [seen, (api.directory / "checkpoint-4" / "mine.txt").exists()]


def gradients_before_the_optimizer(api: Api) -> Any:
    seen: list[Any] = []

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.append(all(parameter.grad is not None for parameter in kwargs["model"].parameters()))

    api.plain_trainer({"max_steps": 2}, callbacks=[_recorder(api, record, ("on_pre_optimizer_step",))]).train()
    return seen


def optimizer_in_callbacks_has_groups(api: Api) -> Any:
    seen: list[Any] = []

    def record(event: str, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        seen.append([group["lr"] for group in kwargs["optimizer"].param_groups])

    api.plain_trainer({"max_steps": 3}, callbacks=[_recorder(api, record, ("on_step_end",))]).train()
    return seen

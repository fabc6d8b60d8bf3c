"""The handler: who is called, with what, and what comes back. Also for callbacks written for transformers."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.trainer_callback import CallbackHandler as TransformersHandler

from ds_trainer.callbacks.defaults import DefaultFlowCallback
from ds_trainer.callbacks.protocol import EVENTS, CallbackHandler, TrainerCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.utils.errors import ConfigError

from .conftest import LogRecords

WITH_RESULT = {"on_evaluate": ({"eval_loss": 1.0},), "on_predict": ({"test_loss": 1.0},), "on_log": ({"loss": 1.0},)}


def handler_of(*callbacks: Any) -> CallbackHandler:
    return CallbackHandler(callbacks, "model", "processor", "optimizer", "scheduler")


def fire(handler: CallbackHandler, event: str, control: TrainerControl | None = None) -> TrainerControl:
    method = getattr(handler, event)
    result: TrainerControl = method("args", TrainerState(), control or TrainerControl(), *WITH_RESULT.get(event, ()))
    return result


class Recorder(TrainerCallback):
    """Writes down one event."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.calls.append((args, kwargs))


def everything(base: type) -> Any:
    """An instance of a subclass of ``base`` that overrides every event and keeps what it was called with."""

    def listener(event: str) -> Any:
        def listen(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.calls.append((event, args, state, control, kwargs))

        return listen

    made = type("Everything", (base,), {event: listener(event) for event in EVENTS})()
    made.calls = []
    return made


def test_the_events_are_those_of_transformers() -> None:
    reference = [name for name in vars(transformers.TrainerCallback) if name.startswith("on_")]
    assert sorted(EVENTS) == sorted(reference) and len(EVENTS) == 16
    for event in EVENTS:
        ours, other = (
            list(inspect.signature(getattr(base, event)).parameters)
            for base in (TrainerCallback, transformers.TrainerCallback)
        )
        assert ours == other, event
        assert (
            getattr(TrainerCallback(), event)(None, None, None, **({"metrics": 1} if "metrics" in ours else {})) is None
        )


@pytest.mark.parametrize("base", [TrainerCallback, transformers.TrainerCallback, object])
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_its_listener_with_everything(event: str, base: type) -> None:
    callback = everything(base)
    handler = handler_of(callback)
    handler.train_dataloader, handler.eval_dataloader = "train loader", "eval loader"
    state, control = TrainerState(), TrainerControl()
    assert getattr(handler, event)("args", state, control, *WITH_RESULT.get(event, ())) is control
    [(name, args, seen_state, seen_control, kwargs)] = callback.calls
    assert (name, args) == (event, "args") and seen_state is state and seen_control is control
    result = {"on_log": {"logs": {"loss": 1.0}}}.get(event)
    if event in ("on_evaluate", "on_predict"):
        result = {"metrics": WITH_RESULT[event][0]}
    assert kwargs == {
        "model": "model",
        "processing_class": "processor",
        "optimizer": "optimizer",
        "lr_scheduler": "scheduler",
        "train_dataloader": "train loader",
        "eval_dataloader": "eval loader",
        **(result or {}),
    }


def test_the_keywords_are_those_that_transformers_passes() -> None:
    ours, reference = everything(TrainerCallback), everything(transformers.TrainerCallback)
    handlers = [CallbackHandler([ours]), TransformersHandler([reference], None, None, None, None)]
    for event in EVENTS:
        for handler in handlers:
            getattr(handler, event)(None, TrainerState(), TrainerControl(), *WITH_RESULT.get(event, ()))
    for (event, *_, kwargs), (_, *_, other) in zip(ours.calls, reference.calls, strict=True):
        assert list(kwargs) == list(other), event


@pytest.mark.parametrize("event", EVENTS)
def test_the_switches_are_reset_as_in_transformers(event: str) -> None:
    ours, reference = (
        TrainerControl(True, True, True, True, True),
        transformers.TrainerControl(True, True, True, True, True),
    )
    handler = TransformersHandler([transformers.trainer_callback.DefaultFlowCallback], None, None, None, None)
    handler.callbacks.clear()
    fire(handler_of(), event, ours)
    getattr(handler, event)(None, None, reference, *WITH_RESULT.get(event, ()))
    assert ours.state() == reference.state()


def test_a_callback_may_change_replace_or_ignore_the_control() -> None:
    replacement = TrainerControl(should_save=True)

    class Changes(TrainerCallback):
        def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            control.should_log = True

    class Replaces(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
            assert control.should_log
            return replacement

    class Probe(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
            assert control is replacement

    assert fire(handler_of(Changes, Replaces, Probe), "on_step_end") is replacement


def test_callbacks_are_called_in_the_order_they_were_added() -> None:
    order: list[str] = []

    def named(name: str) -> Any:
        class Speaks(TrainerCallback):
            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                order.append(name)

        return Speaks()

    handler = handler_of(named("a"), named("b"))
    handler.add_callback(named("c"))
    fire(handler, "on_save")
    assert order == ["a", "b", "c"]


@pytest.mark.parametrize("base", [TrainerCallback, transformers.TrainerCallback])
def test_callbacks_are_called_only_for_events_they_override(base: type) -> None:
    class OnlyLogs(base):  # type: ignore[misc, valid-type]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            pass

    class Inherits(OnlyLogs):
        pass

    handler = handler_of(base(), OnlyLogs(), Inherits())
    for event in EVENTS:
        fire(handler, event)
        assert len(handler._listeners[event]) == (2 if event == "on_log" else 0), event


def test_a_method_from_a_mixin_or_on_the_instance_counts_as_overridden() -> None:
    called: list[str] = []

    class Mixin:
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            called.append("mixin")

    class Mixed(Mixin, TrainerCallback):
        pass

    single = TrainerCallback()
    single.on_save = lambda *args, **kwargs: called.append("instance")  # type: ignore[method-assign]
    handler = handler_of(Mixed(), single)
    fire(handler, "on_save")
    assert called == ["mixin", "instance"]


def test_listeners_follow_every_change_of_the_list() -> None:
    first, second, third = Recorder(), Recorder(), Recorder()
    handler = handler_of(first)

    def counts() -> list[int]:
        fire(handler, "on_step_end")
        return [len(recorder.calls) for recorder in (first, second, third)]

    assert counts() == [1, 0, 0]
    handler.add_callback(second)
    assert counts() == [2, 1, 0]
    handler.remove_callback(first)
    assert counts() == [2, 2, 0]
    handler.callbacks.append(third)  # as users of transformers do
    assert counts() == [2, 3, 1]
    handler.callbacks[0] = first
    assert counts() == [3, 3, 2]
    handler.callbacks = [second]
    assert counts() == [3, 4, 2]
    handler.callbacks.clear()
    assert counts() == [3, 4, 2]


def test_a_method_replaced_on_an_instance_is_seen_when_training_begins() -> None:
    recorder, called = Recorder(), []
    handler = handler_of(recorder, DefaultFlowCallback)
    fire(handler, "on_save")
    recorder.on_save = lambda *args, **kwargs: called.append(1)  # type: ignore[method-assign]
    fire(handler, "on_train_begin")
    fire(handler, "on_save")
    assert called == [1]


def test_custom_events_are_dispatched() -> None:
    class Listens(TrainerCallback):
        def on_full_moon(self, args: Any, state: Any, control: TrainerControl, howl: int, **kwargs: Any) -> None:
            control.should_save = howl > 3

    handler = handler_of(Recorder, Listens)
    assert handler.call_event("on_full_moon", None, TrainerState(), TrainerControl(), howl=4).should_save


def test_adding_and_removing(log: LogRecords) -> None:
    handler = handler_of(Recorder, DefaultFlowCallback())
    assert handler.callback_list == "Recorder\nDefaultFlowCallback"
    recorder = handler.pop_callback(Recorder)
    assert isinstance(recorder, Recorder)
    assert handler.pop_callback(Recorder) is None and handler.pop_callback(recorder) is None
    handler.remove_callback(Recorder)  # nothing of that class: no error, as in transformers
    handler.add_callback(recorder)
    assert handler.pop_callback(recorder) is recorder
    with pytest.raises(ConfigError, match="not among the callbacks") as refused:
        handler.remove_callback(recorder)
    assert "DefaultFlowCallback" in str(refused.value)
    assert handler.pop_callback(TrainerCallback) is not None  # a base class finds the first of its kind
    assert handler.callbacks == [] and log.messages == []


def test_a_second_callback_of_the_same_class_is_warned_about(log: LogRecords) -> None:
    handler = handler_of(Recorder, Recorder)
    assert len(handler.callbacks) == 2
    assert len(log.messages) == 1 and log.messages[0].startswith("WARNING a second Recorder was added")

    class Special(Recorder):
        pass

    handler.add_callback(Special)
    assert len(log.messages) == 1


@pytest.mark.parametrize("thing", [3, "ProgressCallback", lambda: None, SimpleNamespace(on_stepend=print)])
def test_objects_that_are_no_callbacks_are_rejected(thing: Any) -> None:
    with pytest.raises(ConfigError, match="none of the event methods"):
        handler_of(thing)


def test_training_without_the_default_flow_is_warned_about(log: LogRecords) -> None:
    fire(handler_of(Recorder), "on_train_begin")
    assert len(log.messages) == 1 and "have no DefaultFlowCallback" in log.text

    class MyFlow(DefaultFlowCallback):
        pass

    for flow in (DefaultFlowCallback, MyFlow, transformers.trainer_callback.DefaultFlowCallback):
        fire(handler_of(Recorder, flow), "on_train_begin")
    assert len(log.messages) == 1


def test_early_stopping_of_transformers_stops_a_run() -> None:
    stopper = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    handler = handler_of(DefaultFlowCallback, stopper)
    args = SimpleNamespace(
        load_best_model_at_end=True, metric_for_best_model="loss", eval_strategy="steps", greater_is_better=False
    )
    state = TrainerState()
    control = handler.on_train_begin(args, state, TrainerControl())
    decisions = []
    for loss in (3.0, 2.0, 2.5, 2.4, 2.6):
        control = handler.on_evaluate(args, state, control, {"eval_loss": loss})
        decisions.append(control.should_training_stop)
        state.best_metric = min(loss, state.best_metric or loss)
    assert decisions == [False, False, False, True, True]

"""The events of a run, the base class of callbacks, and the handler that calls them.

Names and signatures are those of transformers, so that a callback written for its Trainer works unchanged. The
order of events, as pseudo-code of the loop::

    on_init_end                                        # Trainer.__init__ is done
    on_train_begin                                     # resets should_training_stop
    if eval_on_start: EVALUATE
    for each epoch:
        on_epoch_begin                                 # resets should_epoch_stop
        for each optimizer step:
            on_step_begin                              # resets should_log, should_evaluate, should_save
            for each micro-batch but the last:
                forward, backward
                on_substep_end
            forward, backward of the last one
            on_pre_optimizer_step
            clip, update weights, clear gradients      # one call of the engine
            on_optimizer_step
            state.global_step += 1
            on_step_end                                # DefaultFlowCallback decides here
            ACT
            if should_epoch_stop or should_training_stop: leave the epoch
        on_epoch_end                                   # ... and here
        ACT
        if should_training_stop: leave
    on_log                                             # the summary of the run: train_runtime, train_loss, ...
    on_train_end

    ACT:    if should_log:       on_log                # loss, learning_rate, grad_norm, ...
            if should_evaluate:  EVALUATE              # then: is this model the best so far?
            if should_save:      write the checkpoint
                                 on_save

    EVALUATE: for each batch: on_prediction_step
              on_log                                   # eval_loss, ...
              on_evaluate

    Trainer.predict:    for each batch: on_prediction_step; on_predict
    on_push_begin       before a model is uploaded to a hub

Two things differ from a loop without DeepSpeed: gradients are clipped inside the engine's step, hence *after*
``on_pre_optimizer_step``, and they are cleared before ``on_optimizer_step``. Every rank runs every callback. A callback
that acts once per run checks ``state.is_world_process_zero``; one that sets ``control`` must decide equally on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger

logger = get_logger("callbacks.protocol")


class TrainerCallback:
    """Base class of callbacks: a method per event that does nothing. Override the events you need.

    Every event receives ``args`` (the training arguments), ``state``, ``control``, and by keyword ``model``,
    ``processing_class``, ``optimizer``, ``lr_scheduler``, ``train_dataloader`` and ``eval_dataloader``, with
    ``logs`` (``on_log``) or ``metrics`` (``on_evaluate``, ``on_predict``): name the ones you need and end the
    signature with ``**kwargs``. An event may change ``control`` in place or return another one; None keeps it.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The trainer has been constructed."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training begins; ``state.global_step`` is above 0 if it resumes."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Training has ended, after its last log and checkpoint."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch begins."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An epoch has ended."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An optimizer step begins, before its first micro-batch."""

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """All gradients of the step are computed but not clipped; the weights are still the old ones."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The weights have been updated; ``state.global_step`` does not count the step yet."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A micro-batch other than the last one of its optimizer step is done."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An optimizer step is done and counted."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """An evaluation is done; its results are in ``metrics``."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any) -> Any:
        """A prediction is done; its results are in ``metrics``."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """A checkpoint has been written."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Something was logged: ``logs``."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """One batch of an evaluation or a prediction is done."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """The model is about to be uploaded to a hub."""


EVENTS: tuple[str, ...] = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
"""The names of all events."""

Listener = Callable[..., Any]


class CallbackHandler:
    """Holds the callbacks of a trainer and calls those that override an event, in the order in which they were added.

    ``callbacks`` are classes or instances. The trainer sets ``model``, ``optimizer``, ``lr_scheduler`` and the two
    loaders as soon as it has them; every event passes them on.

    An event that no callback overrides costs one comparison of lists: the listeners are cached.

    Attributes:
        callbacks: those that users see, add and remove.
        own: callbacks of the package, called before them; set before the first event.
        around: makes the context in which callbacks of others are called, of an event.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any = None,
        processing_class: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
    ) -> None:
        self.callbacks: list[Any] = []
        self.own: list[Any] = []
        self.around: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self._listeners: dict[str, list[Listener]] = {}
        self._listeners_of: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Any) -> None:
        """Append a callback, or an instance of a callback class. A second one of the same class is added with a
        warning.

        Raises:
            ConfigError: it has no event method.
        """
        instance = callback() if isinstance(callback, type) else callback
        if not any(callable(getattr(instance, event, None)) for event in EVENTS):
            raise ConfigError(
                f"{instance!r} is not a callback: it has none of the event methods ({', '.join(EVENTS)})."
                " Inherit from ds_trainer.TrainerCallback."
            )
        if type(instance) in [type(other) for other in self.callbacks]:
            logger.warning(
                "a second %s was added to the callbacks. The callbacks are now:\n%s",
                type(instance).__name__,
                self.callback_list,
            )
        self.callbacks.append(instance)
        self._forget_listeners()

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it: this instance, or the first one of this class. None if there is none."""
        for index, candidate in enumerate(self.callbacks):
            matches = isinstance(candidate, callback) if isinstance(callback, type) else candidate == callback
            if matches:
                self._forget_listeners()
                return self.callbacks.pop(index)
        return None

    def remove_callback(self, callback: Any) -> None:
        """Remove this instance, or the first one of this class.

        Raises:
            ConfigError: the instance is not among the callbacks. (A class without an instance is not an error.)
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ConfigError(f"{callback!r} cannot be removed: it is not among the callbacks:\n{self.callback_list}")

    @property
    def callback_list(self) -> str:
        """The class names of all callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: the Trainer was constructed."""
        return self.call_event("on_init_end", args, state, control)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: training begins."""
        self._forget_listeners()  # a method of an instance may have been replaced
        if not any(_named(callback, "DefaultFlowCallback") for callback in self.callbacks):
            logger.warning(
                "the callbacks have no DefaultFlowCallback: the run does not log, evaluate, save or stop at max_steps"
                " unless another callback requests it. Callbacks:\n%s",
                self.callback_list,
            )
        control._new_training()
        return self.call_event("on_train_begin", args, state, control)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: training has ended."""
        return self.call_event("on_train_end", args, state, control)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: an epoch begins."""
        control._new_epoch()
        return self.call_event("on_epoch_begin", args, state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: an epoch has ended."""
        return self.call_event("on_epoch_end", args, state, control)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: a step begins."""
        control._new_step()
        return self.call_event("on_step_begin", args, state, control)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: gradients are complete, weights unchanged."""
        return self.call_event("on_pre_optimizer_step", args, state, control)

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: the optimizer has updated the weights."""
        return self.call_event("on_optimizer_step", args, state, control)

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: a micro-batch of a step is done."""
        return self.call_event("on_substep_end", args, state, control)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: a step has ended."""
        return self.call_event("on_step_end", args, state, control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any) -> TrainerControl:
        """Call the callbacks: an evaluation has ended with ``metrics``."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics)

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any) -> TrainerControl:
        """Call the callbacks: a prediction has ended with ``metrics``."""
        return self.call_event("on_predict", args, state, control, metrics=metrics)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: a checkpoint was saved."""
        control.should_save = False
        return self.call_event("on_save", args, state, control)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any) -> TrainerControl:
        """Call the callbacks: ``logs`` are recorded."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs)

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: a batch of an evaluation is done."""
        return self.call_event("on_prediction_step", args, state, control)

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Call the callbacks: a push to the Hub begins."""
        return self.call_event("on_push_begin", args, state, control)

    def call_event(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call every listener of ``event``. Returns the control that the last one left.

        ``event`` may be one of :data:`EVENTS` or a name of your own: callbacks without such a method are skipped.
        """
        # Comparing identical elements is one pointer comparison each; it detects changes of the list by others.
        if self.callbacks != self._listeners_of:
            self._forget_listeners()
        listeners = self._listeners.get(event)
        if listeners is None:
            listeners = self._listeners[event] = self.listeners(event)
        for listener in listeners:
            own = getattr(listener, "__module__", "").startswith("ds_trainer.")
            with nullcontext() if own else self.around(event):
                result = listener(
                    args,
                    state,
                    control,
                    model=self.model,
                    processing_class=self.processing_class,
                    optimizer=self.optimizer,
                    lr_scheduler=self.lr_scheduler,
                    train_dataloader=self.train_dataloader,
                    eval_dataloader=self.eval_dataloader,
                    **kwargs,
                )
            if result is not None:
                control = result
        return control

    def listeners(self, event: str) -> list[Listener]:
        """The methods that :meth:`call_event` calls, in order."""
        return _listeners([*self.own, *self.callbacks], event)

    def _forget_listeners(self) -> None:
        self._listeners = {}
        self._listeners_of = list(self.callbacks)


def _listeners(callbacks: Iterable[Any], event: str) -> list[Listener]:
    """The bound methods for ``event`` of the callbacks that override it."""
    listeners: list[Listener] = []
    for callback in callbacks:
        method = getattr(callback, event, None)
        if callable(method) and getattr(method, "__func__", method) not in _no_ops(callback, event):
            listeners.append(method)
    return listeners


def _no_ops(callback: Any, event: str) -> list[Any]:
    """The empty methods for ``event`` that ``callback`` may have inherited: ours, and that of transformers.

    This does not import transformers: a callback that inherits from its class has already imported it.
    """
    return [
        vars(base)[event]
        for base in type(callback).__mro__
        if (base is TrainerCallback or (base.__module__, base.__name__) == _TRANSFORMERS_BASE) and event in vars(base)
    ]


_TRANSFORMERS_BASE = ("transformers.trainer_callback", "TrainerCallback")


def _named(callback: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(callback).__mro__)

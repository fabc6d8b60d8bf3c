"""``Tracker``: base class of the callbacks for experiment trackers.

Only the main process writes; the others do not import the tracker's library. The run is opened when training begins (or
at the first log of a process that only evaluates), receives every log event, and is finished when training ends. Later
logs go to the same run.

Failures: a service that needs a key and has none is refused before a model is built, and a run that cannot be opened
stops the training before its first step, with one error. A later error of a tracker does not stop
the training: one warning names the tracker and the error, and the tracker is disabled until the next training begins.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ds_trainer.callbacks.protocol import TrainerCallback
from ds_trainer.callbacks.state import TrainerControl, TrainerState
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import EVERY_RANK, get_logger

logger = get_logger("callbacks.integrations")

# Measured once per training: a value of the run, not a point on a curve.
SUMMARY = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


class Tracker(TrainerCallback):
    """Base class. A tracker defines :meth:`start`, :meth:`write` and :meth:`finish`.

    Args:
        deepspeed_config: returns the compiled DeepSpeed configuration, recorded with the hyperparameters.
    """

    name: str
    """Its name in ``report_to``."""
    package: str
    """The package to import."""
    install: str
    """What ``pip install`` takes."""

    def __init__(self, deepspeed_config: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self.deepspeed_config = deepspeed_config
        self._running = False
        self._off = False
        self._left_out: set[str] = set()

    # -- defined by each tracker; called on the main process only; may raise ------------------------------------------

    def start(self, args: Any, state: TrainerState, model: Any) -> None:
        """Open the run and record its hyperparameters."""
        raise NotImplementedError

    def write(self, logs: dict[str, Any], state: TrainerState) -> None:
        """Record one log event."""
        raise NotImplementedError

    def finish(self, args: Any, state: TrainerState, model: Any) -> None:
        """Training has ended. A later :meth:`write` must still work."""

    def check(self, args: Any) -> None:
        """Raise ConfigError for settings that cannot work; called when the Trainer is constructed."""

    def check_access(self) -> None:
        """Raise an error of the library, or ConfigError, if a service wants a key that there is not."""

    # -- events -------------------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check what can be checked before training."""
        if state.is_world_process_zero:
            self.check_usable()
            self.check(args)

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Open the run."""
        if state.is_world_process_zero:
            self._off = False
            self._refusing(self.start, args, state, model)
            self._running = True

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Record the logs."""
        if logs and state.is_world_process_zero:
            self.guarded(self._write, args, state, model, dict(logs))

    def on_predict(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Record the metrics of a prediction."""
        self.on_log(args, state, control, logs=metrics, model=model)

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Finish the run."""
        if self._running and state.is_world_process_zero:
            self.guarded(self.finish, args, state, model)

    def _write(self, args: Any, state: TrainerState, model: Any, logs: dict[str, Any]) -> None:
        if not self._running:
            self.start(args, state, model)
            self._running = True
        self.write(logs, state)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def guarded(self, act: Callable[..., None], *arguments: Any) -> None:
        """Call ``act(*arguments)`` unless the tracker is disabled. An error disables the tracker, with a warning."""
        if self._off:
            return
        try:
            act(*arguments)
        except Exception as error:
            switched_off(self.name, error)
            self._off = True
            self._running = False

    def check_usable(self) -> None:
        """Import the library and look for the key.

        Raises:
            ConfigError: either is missing.
        """
        self.library()
        self._refusing(self.check_access)

    def _refusing(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except ConfigError:
            raise
        except Exception as error:
            text = str(error).strip().rstrip(".") or type(error).__name__
            raise ConfigError(f"report_to={self.name}: {text}. Otherwise take {self.name} out of report_to.") from error

    def library(self) -> ModuleType:
        """The tracker's module.

        Raises:
            ConfigError: it cannot be imported.
        """
        return import_tracker(self.name, self.package, self.install)

    def leave_out(self, name: str, value: Any) -> None:
        """Warn, once per name, that this tracker cannot record such a value."""
        if name not in self._left_out:
            self._left_out.add(name)
            logger.warning("%s records numbers only; left out %s=%r (%s)", self.name, name, value, type(value).__name__)


def import_tracker(name: str, package: str, install: str) -> ModuleType:
    """Import ``package`` for the tracker ``name``.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"report_to={name}: {package} cannot be imported ({error}). Run `pip install {install}`, or take {name}"
            " out of report_to."
        ) from error


def switched_off(name: str, error: Exception) -> None:
    """Warn that a tracker failed and is disabled."""
    text = "%s failed and is disabled; training continues without it: %s: %s"
    logger.warning(text, name, type(error).__name__, error, extra=EVERY_RANK)


def rewrite_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """``eval_loss`` as ``eval/loss``, ``test_loss`` as ``test/loss``, every other name as ``train/name``."""
    renamed = {}
    for name, value in logs.items():
        section, _, rest = name.partition("_")
        renamed[f"{section}/{rest}" if section in ("eval", "test") and "_" in name else f"train/{name}"] = value
    return renamed


def number(value: Any) -> int | float | None:
    """``value`` as a number; also for a tensor or array of one element. None if it is not a number."""
    if isinstance(value, int | float):
        return value
    if not callable(getattr(type(value), "item", None)):
        return None
    try:
        element = value.item()
    except (RuntimeError, ValueError):  # raised by torch and numpy for more than one element
        return None
    return element if isinstance(element, int | float) else None

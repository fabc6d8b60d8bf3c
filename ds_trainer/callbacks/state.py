"""The state that callbacks read and the flags that they set: :class:`TrainerState`, :class:`TrainerControl`.

Fields and file format are those of transformers: either library can read the other's ``trainer_state.json``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.monitor.metrics_file import plain
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import parse_json, write_text_atomic
from ds_trainer.utils.logging import get_logger

logger = get_logger("callbacks.state")

STATE_FILE = "trainer_state.json"
"""The file of a :class:`TrainerState` in a checkpoint and in the output directory."""


class ExportableState:
    """Mixin for callbacks whose state belongs in the checkpoint (an early-stopping counter, for example).

    :meth:`state` returns ``{"args": {...}, "attributes": {...}}``: the constructor's arguments, and the values that
    have changed since. All of it must be plain JSON. Objects of other libraries with the same two methods work too.
    """

    def state(self) -> dict[str, Any]:
        """The state of this object as plain data."""
        raise NotImplementedError(f"{type(self).__name__} must define state() to be kept in a checkpoint")

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Any:
        """A new object with this state."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


def is_exportable(candidate: Any) -> bool:
    """Whether ``candidate`` can be kept in a checkpoint: it has ``state`` and ``from_state``."""
    return callable(getattr(candidate, "state", None)) and callable(getattr(candidate, "from_state", None))


def export_states(objects: Iterable[Any]) -> dict[str, Any]:
    """The states of all exportable ``objects``: class name to state, or to a list if a class occurs twice."""
    exported: dict[str, Any] = {}
    for candidate in objects:
        if not is_exportable(candidate):
            continue
        name, state = type(candidate).__name__, candidate.state()
        if name not in exported:
            exported[name] = state
        elif isinstance(exported[name], list):
            exported[name].append(state)
        else:
            exported[name] = [exported[name], state]
    return exported


def restore_states(objects: Iterable[Any], states: Mapping[str, Any], *, include_arguments: bool = False) -> None:
    """Restore the states that :func:`export_states` returned into ``objects``, by class name and order, in place.

    The values that changed during the run (``"attributes"``) are restored. The constructor's arguments (``"args"``)
    stay as they are, unless ``include_arguments``. Warnings name states without a matching object, and objects without
    a state.
    """
    waiting = {name: list(state) if isinstance(state, list) else [state] for name, state in states.items()}
    without: list[str] = []
    for candidate in objects:
        name = type(candidate).__name__
        if not is_exportable(candidate):
            continue
        if not waiting.get(name):
            without.append(name)
            continue
        state = waiting[name].pop(0)
        if include_arguments:
            vars(candidate).update(vars(candidate.from_state(state)))
            continue
        for attribute, value in state.get("attributes", {}).items():
            setattr(candidate, attribute, value)
    # Files of transformers hold the control too; its flags last for one step.
    unclaimed = [name for name, left in waiting.items() if left and name != TrainerControl.__name__]
    if unclaimed:
        logger.warning(
            "ignored the state of callbacks that are in the checkpoint but not in this run: %s", ", ".join(unclaimed)
        )
    if without:
        logger.warning(
            "the checkpoint has no state of these callbacks of this run, which begin as they are: %s",
            ", ".join(without),
        )


@dataclass
class TrainerState:
    """The progress of a run; saved as ``trainer_state.json``. A step is an optimizer step of any number of batches."""

    epoch: float = 0
    """Epochs completed; the fractional part is the progress in the current one."""
    global_step: int = 0
    """Optimizer steps completed."""
    max_steps: int = 0
    """Optimizer steps after which the run ends."""
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    """Samples of one micro-batch on one device."""
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """Every log event, oldest first, each with its ``step``."""
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    """Whether this process is the first of its machine. In a file, the value of the process that wrote it: set it after
    loading."""
    is_world_process_zero: bool = True
    """Whether this process is the first of all. In a file, the value of the process that wrote it: set it after
    loading."""
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)
    """Result of :func:`export_states`. The constructor also takes the callbacks themselves."""

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if self.stateful_callbacks is None:
            self.stateful_callbacks = {}
        elif not isinstance(self.stateful_callbacks, dict):
            callbacks = list(self.stateful_callbacks)
            for callback in callbacks:
                if not is_exportable(callback):
                    raise ConfigError(
                        f"stateful_callbacks holds a {type(callback).__name__}, which has no state() and from_state()."
                        " Inherit from ExportableState, or leave it out."
                    )
            self.stateful_callbacks = export_states(callbacks)

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write all fields to ``json_path``, atomically."""
        write_text_atomic(json_path, self.to_json())

    def snapshot(self) -> TrainerState:
        """A copy that later steps and callbacks do not change. Values in log entries must be plain data."""
        return dataclasses.replace(
            self,
            log_history=[dict(entry) for entry in self.log_history],
            stateful_callbacks=plain(self.stateful_callbacks),
            trial_params=plain(self.trial_params),
        )

    def to_json(self) -> str:
        """All fields as indented JSON. Scalars of torch and numpy become numbers."""
        values = {item.name: plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> TrainerState:
        """Read the state that :meth:`save_to_json` wrote.

        Unknown keys are ignored, with a warning that names them.

        Raises:
            ConfigError: there is no such file, or it is not a trainer state.
        """
        remedy = "Name another checkpoint to resume from."
        try:
            values = parse_json(Path(json_path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"There is no trainer state at {json_path}. {remedy}") from None
        except ValueError as error:  # not JSON, or not UTF-8
            raise ConfigError(f"{json_path} is not a trainer state: {error}. {remedy}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{json_path} holds a JSON {type(values).__name__}, not a trainer state. {remedy}")
        known = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            logger.warning("%s: ignored unknown keys: %s", json_path, ", ".join(unknown))
        values = {name: value for name, value in values.items() if name in known}
        for name in ("global_step", "max_steps"):
            value = values.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{json_path}: {name} is {value!r}, not a number of steps. {remedy}")
        return cls(**values)

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Set ``logging_steps``, ``eval_steps`` and ``save_steps`` from ``args``, as whole numbers of steps.

        A value below 1 is a fraction of ``max_steps``, rounded up. None leaves the field unchanged.
        """
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(args, name, None)
            if value is None:
                continue
            if 0 < value < 1:
                # 0.07 of 100 is 7, although 100 * 0.07 is a little more than 7 in binary
                value = max(1, math.ceil(max_steps * value - 1e-9))
            setattr(self, name, int(value))


@dataclass
class TrainerControl(ExportableState):
    """Flags that callbacks set and the loop acts on."""

    should_training_stop: bool = False
    """End the run after this step. Reset when a training begins."""
    should_epoch_stop: bool = False
    """Continue with the next epoch after this step. Reset when an epoch begins."""
    should_save: bool = False
    """Save a checkpoint. Reset when a step begins, and once saved."""
    should_evaluate: bool = False
    """Evaluate. Reset when a step begins, and once evaluated."""
    should_log: bool = False
    """Log. Reset when a step begins, and once logged."""

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = False
        self.should_evaluate = False
        self.should_log = False

    def state(self) -> dict[str, Any]:
        """All flags; :meth:`from_state` creates an equal object."""
        return {"args": dataclasses.asdict(self), "attributes": {}}

"""Finds the behaviors, runs one with a library, and compares what two libraries gave."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_trainer.engine.process_group import stop_process_group
from tests.behaviors import topics
from tests.behaviors.api import Api, builtin_name

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Behavior:
    """A function of a topic.

    Attributes:
        topic: the name of its file.
        function: returns what a script sees.
    """

    topic: str
    function: Callable[[Api], Any]

    @property
    def name(self) -> str:
        """``topic/function``."""
        return f"{self.topic}/{self.function.__name__}"


def all_behaviors() -> list[Behavior]:
    """Every behavior, by topic, in the order of the files."""
    found = []
    for info in pkgutil.iter_modules(topics.__path__):
        module = importlib.import_module(f"{topics.__name__}.{info.name}")
        found += [
            Behavior(info.name, value)
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        ]
    return found


def leave_processes() -> None:
    """Forget process group and state of accelerate, which each library would take over from the other."""
    from accelerate.state import AcceleratorState, GradientState

    if torch.distributed.is_initialized():
        stop_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def outcome(behavior: Behavior, module: Any, directory: Path, shared_results: dict[Any, Any]) -> Any:
    """What ``behavior`` gives with the classes of ``module``, as plain data; an exception becomes its class."""
    directory.mkdir(parents=True)
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        result = behavior.function(Api(module, directory, shared_results))
    except Exception as error:
        return {"raised": builtin_name(error), "text": str(error)}
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
    return plain(result, directory)


def plain(value: Any, directory: Path) -> Any:
    """``value`` as JSON-like data. Paths below ``directory`` become relative, objects the name of their class."""
    if isinstance(value, Enum):
        return plain(value.value, directory)
    if isinstance(value, torch.Tensor | np.ndarray):
        return plain(value.tolist(), directory)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return str(value).replace(str(directory), "OUTPUT")
    if isinstance(value, Mapping):
        return {str(plain(key, directory)): plain(item, directory) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item, directory) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item, directory) for item in value]
    return (value if isinstance(value, type) else type(value)).__name__


def difference(ours: Any, reference: Any, path: str = "result") -> str | None:
    """Where two results differ first; None if they agree: numbers to :data:`TOLERANCE`, all else exactly."""
    if isinstance(reference, Mapping) and "raised" in reference and isinstance(ours, Mapping) and "raised" in ours:
        return None if ours["raised"] == reference["raised"] else f"{path}: {ours} and {reference}"
    if type(ours) is not type(reference):
        return f"{path}: {ours!r} and {reference!r}"
    if isinstance(reference, Mapping):
        if set(ours) != set(reference):
            more, less = sorted(set(ours) - set(reference)), sorted(set(reference) - set(ours))
            return f"{path}: only here {more}, only there {less}"
        return next((d for key in reference if (d := difference(ours[key], reference[key], f"{path}.{key}"))), None)
    if isinstance(reference, list):
        if len(ours) != len(reference):
            return f"{path}: {ours} and {reference}"
        pairs = enumerate(zip(ours, reference, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{path}[{i}]"))), None)
    if isinstance(reference, float):
        same = math.isclose(ours, reference, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return None if same or (math.isnan(ours) and math.isnan(reference)) else f"{path}: {ours} and {reference}"
    return None if ours == reference else f"{path}: {ours!r} and {reference!r}"

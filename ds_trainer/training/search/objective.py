"""The default objective of a search, and the check of a custom one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ds_trainer.training.evaluation.outputs import RUNTIME_METRICS
from ds_trainer.training.search.trial import SearchError

_SPEED = ("_runtime", "_per_second")
_MEMORY = re.compile("_mem_(cpu|gpu)(_|$)")


def default_compute_objective(metrics: Mapping[str, Any]) -> float:
    """The sum of all metrics, or the evaluation loss if there are no other metrics.

    The sum leaves out evaluation losses (one for each evaluation set), epoch, speed, memory, the number of items, and
    values that are not numbers.

    Args:
        metrics: the result of ``Trainer.evaluate``.

    Raises:
        SearchError: there is neither a metric nor a loss.
    """
    prefixes = {"eval"} | {name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")}
    losses = {f"{prefix}_loss" for prefix in prefixes}
    excluded = {"epoch"} | {f"{prefix}_{name}" for prefix in prefixes for name in RUNTIME_METRICS}
    measured, loss_values = [], []
    for name, value in metrics.items():
        if name in losses:
            loss_values.append(float(value))
        elif _is_number(value) and name not in excluded and not name.endswith(_SPEED) and not _MEMORY.search(name):
            measured.append(float(value))
    if not measured and not loss_values:
        raise SearchError(
            f"The evaluation has neither a loss nor a metric ({', '.join(metrics)}): add labels to the evaluation "
            "set, or pass compute_metrics or compute_objective."
        )
    return sum(measured or loss_values)


def checked_objective(objective: Any, directions: int | None) -> float | list[float]:
    """Check the result of ``compute_objective``, and convert it to one float or to one for each direction.

    Args:
        objective: the result.
        directions: number of directions; None for a single number instead of a list.

    Raises:
        SearchError: the result has another form.
    """
    values = list(objective) if isinstance(objective, Sequence) and not isinstance(objective, str) else [objective]
    numbers = [value.item() if callable(getattr(value, "item", None)) else value for value in values]
    wanted = directions or 1
    if len(numbers) != wanted or not all(_is_number(value) for value in numbers):
        what = "one number" if wanted == 1 else f"{wanted} numbers, one for each direction"
        raise SearchError(f"compute_objective returned {objective!r}, but the search needs {what}.")
    return float(numbers[0]) if directions is None else [float(value) for value in numbers]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""What a search optimises where nobody says otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ds_trainer.training.evaluation.outputs import ABOUT_ITSELF
from ds_trainer.training.search.trial import SearchEnds

_SPEED = ("_runtime", "_per_second")
_MEMORY = re.compile("_mem_(cpu|gpu)(_|$)")


def default_compute_objective(metrics: Mapping[str, Any]) -> float:
    """The evaluation's loss where nothing else was measured, otherwise the sum of all metrics.

    Losses of evaluations (one for each evaluation set), epoch, speed, memory, the number of items, and whatever is no
    number do not enter the sum.

    Args:
        metrics: result of ``Trainer.evaluate``.

    Raises:
        SearchEnds: there is neither a metric nor a loss.
    """
    prefixes = {"eval"} | {name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")}
    losses = {f"{prefix}_loss" for prefix in prefixes}
    itself = {"epoch"} | {f"{prefix}_{name}" for prefix in prefixes for name in ABOUT_ITSELF}
    measured, lost = [], []
    for name, value in metrics.items():
        if name in losses:
            lost.append(float(value))
        elif _is_number(value) and name not in itself and not name.endswith(_SPEED) and not _is_memory(name):
            measured.append(float(value))
    if not measured and not lost:
        raise SearchEnds(
            f"The evaluation has neither a loss nor a metric ({', '.join(metrics)}): give the evaluation set labels, "
            "or pass compute_metrics or compute_objective."
        )
    return sum(measured or lost)


def checked_objective(objective: Any, directions: int | None) -> float | list[float]:
    """What ``compute_objective`` returned, as one number or as one for each of several ``directions``.

    Args:
        objective: what it returned.
        directions: how many numbers are wanted; None for one number that is not in a list.

    Raises:
        SearchEnds: it is something else.
    """
    values = list(objective) if isinstance(objective, Sequence) and not isinstance(objective, str) else [objective]
    numbers = [value.item() if callable(getattr(value, "item", None)) else value for value in values]
    wanted = directions or 1
    if len(numbers) != wanted or not all(_is_number(value) for value in numbers):
        what = "one number" if wanted == 1 else f"{wanted} numbers, one for each direction"
        raise SearchEnds(f"compute_objective returned {objective!r}, but the search wants {what}.")
    return float(numbers[0]) if directions is None else [float(value) for value in numbers]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_memory(name: str) -> bool:
    return _MEMORY.search(name) is not None

"""Spikes of a curve: values far above those before, with the samples of their steps where the order is known."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ds_trainer.data.order import epoch_order
from ds_trainer.monitor.metrics_file import LOSSES
from ds_trainer.monitor.report.run_files import Points, RunFiles, is_number

_WINDOW = 20  # earlier values that a value is compared with
_FEWEST = 5
_LEAST_RATIO = {**dict.fromkeys(LOSSES, 1.5), "grad_norm": 4.0}
_DEVIATIONS = 8.0  # median absolute deviations
MOST_SPIKES = 20
_MOST_SAMPLES = 32


@dataclass(frozen=True)
class Spike:
    """A value far above its predecessors.

    Attributes:
        name: ``loss`` or ``grad_norm``.
        first_step, step: the steps that the value is of; ``grad_norm`` is that of the last step only.
        value: infinite or NaN values are None.
        usual: median of the values before; None if none was finite.
        epoch: epoch of the steps, from 0; None if the order of the data is not known.
        samples: positions in the dataset of the samples of these steps; None if they are not known.
        more: number of further samples.
    """

    name: str
    first_step: int
    step: int
    value: float | None
    usual: float | None
    epoch: int | None = None
    samples: list[int] | None = None
    more: int = 0


def spikes_of(files: RunFiles) -> list[dict[str, Any]]:
    """The spikes of the loss and the gradient norm, and values that are not finite, by step; the largest ones."""
    found: list[Spike] = []
    for name, ratio in _LEAST_RATIO.items():
        points = files.curve(name)
        found += find_spikes(name, points, ratio)
        usual = statistics.median([value for _, value in points]) if points else None
        steps = [step for step, _ in points]
        for step in files.not_finite(name):
            before = max((int(other) for other in steps if other < step), default=int(step) - 1)
            found.append(Spike(name, before + 1, int(step), None, usual))
    found.sort(key=lambda spike: -(spike.value / spike.usual if spike.value and spike.usual else float("inf")))
    chosen = sorted(found[:MOST_SPIKES], key=lambda spike: (spike.step, spike.name))
    return [asdict(with_samples(spike, files)) for spike in chosen]


def find_spikes(name: str, points: Points, ratio: float) -> list[Spike]:
    """The values that are more than ``ratio`` times, and many deviations above, the median of those before."""
    recent: deque[float] = deque(maxlen=_WINDOW)
    found: list[Spike] = []
    before = 0
    for step, value in points:
        if len(recent) >= _FEWEST:
            usual = statistics.median(recent)
            deviation = statistics.median(abs(one - usual) for one in recent)
            if value > max(usual + _DEVIATIONS * deviation, ratio * usual) and value > 0:
                first = before + 1 if name != "grad_norm" else int(step)
                found.append(Spike(name, min(first, int(step)), int(step), value, usual))
        recent.append(value)
        before = int(step)
    return found


def with_samples(spike: Spike, files: RunFiles) -> Spike:
    """``spike`` with its epoch and samples, if the order of the data is known."""
    order = _order_of(files)
    if order is None:
        return spike
    per_epoch, per_step = int(order["steps_per_epoch"]), int(order["samples_per_step"])
    epoch, first = divmod(spike.first_step - 1, per_epoch)
    last = min(spike.step - 1 - epoch * per_epoch, per_epoch - 1)
    start, stop = first * per_step, min((last + 1) * per_step, int(order["samples"]))
    if start >= stop:
        return spike
    shown = range(start, min(stop, start + _MOST_SAMPLES))
    places = epoch_order(int(order["samples"]), int(order["seed"]), epoch, bool(order["shuffle"])).at(np.array(shown))
    values = {**asdict(spike), "epoch": epoch, "samples": [int(place) for place in places]}
    return Spike(**{**values, "more": stop - start - len(shown)})


def _order_of(files: RunFiles) -> dict[str, Any] | None:
    """The order of the data if it was the same in all processes, and no rollback has skipped any."""
    orders = [session.start.get("order") for session in files.sessions]
    if not orders or any(order != orders[0] for order in orders) or not isinstance(orders[0], dict):
        return None
    if any(is_number(record.get("rolled_back_from_step")) for record in files.records):
        return None
    return orders[0]

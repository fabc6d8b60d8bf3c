"""The content of a report as plain data: what ``report.json`` has, and what the page shows."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_trainer.data.order import epoch_order
from ds_trainer.monitor import throughput
from ds_trainer.monitor.memory import BYTES_PER_GB
from ds_trainer.monitor.metrics_file import LOSSES
from ds_trainer.monitor.report.advice import TimeUse, advice_of, time_use
from ds_trainer.monitor.report.outcome import checks_of, incidents_of, outcome_of
from ds_trainer.monitor.report.run_files import Points, RunFiles, is_number
from ds_trainer.utils.secrets import without_secrets

FORMAT = 1
MOST_POINTS = 800
"""Points of a curve in a report; a longer one keeps the largest and the smallest value of each part."""
MOST_SOURCES, MOST_SOURCE_POINTS = 200, 100
"""Sources whose losses are in a report, and points of the curve of each."""
_SPEED = ("tokens_per_second", "mfu", "memory_gb", "data_wait")
_FIRST = (*LOSSES, "grad_norm", "learning_rate", *_SPEED)
_MOST_CURVES = 40


def report_of(files: RunFiles, device_hour_price: float | None = None) -> dict[str, Any]:
    """The report of a run.

    Args:
        files: what the run has written.
        device_hour_price: price of one device for one hour; None: the one that the run was given, if any.
    """
    outcome, use, spikes = outcome_of(files), time_use(files), spikes_of(files)
    speed, memory = _speed(files, use), _memory(files)
    start = files.start
    price = device_hour_price if device_hour_price is not None else start.get("device_hour_price")
    loss_spikes = sum(spike["name"] == files.loss_name for spike in spikes)
    return {
        "format": FORMAT,
        "name": start.get("run_name") or files.directory.absolute().name,
        "directory": str(files.directory.absolute()),
        "made": round(time.time(), 3),
        "summary": {
            "outcome": {"state": outcome.state, "text": outcome.text, "details": outcome.details,
                        "exit_code": outcome.exit_code},
            "quality": _quality(files),
            "speed": speed,
            "cost": _cost(files, use, price),
            "advice": [one._asdict() for one in advice_of(files, outcome.state, use, speed, memory, loss_spikes)]
        },
        "curves": {name: thinned(points) for name, points in _curves(files).items()},
        "not_finite": {name: steps for name in (files.loss_name, "grad_norm") if (steps := files.not_finite(name))},
        "evaluations": {name: thinned(points) for name, points in files.evaluation_losses().items()},
        "sources": {
            loss: {name: thinned(points, MOST_SOURCE_POINTS) for name, points in list(by_source.items())[:MOST_SOURCES]}
            for loss, by_source in files.source_losses().items()
        },
        "experts": files.expert_loads(),
        "spikes": spikes,
        "time": _time(files, use),
        "memory": memory,
        "ranks": _ranks(files),
        "data": without_secrets(files.data) if files.data else None,
        "checks": checks_of(files),
        "incidents": incidents_of(files),
        "incident_files": files.notes,
        "command": start.get("command"),
        "working_directory": start.get("directory"),
        "arguments": start.get("arguments", []),
        "versions": start.get("versions") or (files.results or {}).get("versions") or {},
        "git": start.get("git"),
        "machine": {"host": start.get("host"), "system": start.get("system")},
        "header": start.get("header", []),
        "processes": [_process(session) for session in files.sessions],
        "results": _results(files)
    }  # fmt: skip


def thinned(points: Points, most: int = MOST_POINTS) -> list[list[float]]:
    """At most about ``most`` of ``points``: the smallest and the largest value of each part, so that spikes stay."""
    if len(points) <= most:
        return [list(point) for point in points]
    size = -(-len(points) // (most // 2))
    kept: list[tuple[float, float]] = []
    for first in range(0, len(points), size):
        part = points[first : first + size]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return [list(point) for point in kept]


def _curves(files: RunFiles) -> dict[str, Points]:
    logged = files.quantities()
    evaluated = files.evaluation_losses()
    names = [name for name in _FIRST if name in logged]
    names += [name for name in logged if name not in names and name not in evaluated]
    return {name: files.curve(name) for name in names[:_MOST_CURVES]}


def _quality(files: RunFiles) -> dict[str, Any]:
    loss = files.curve(files.loss_name)
    tail = [value for _, value in loss[-max(1, len(loss) // 20) :]]
    quality: dict[str, Any] = {
        "first_loss": loss[0][1] if loss else None,
        "last_loss": loss[-1][1] if loss else None,
        "recent_loss": statistics.fmean(tail) if tail else None,
        "loss_not_finite": bool(files.not_finite(files.loss_name)),
        "steps": files.last_step,
        "planned_steps": files.summary.get("max_steps"),
        "evaluations": {},
        "metrics": {},
    }
    for name, points in files.evaluation_losses().items():
        step, best = min(points, key=lambda point: point[1])
        quality["evaluations"][name] = {"best": best, "best_step": step, "last": points[-1][1], "step": points[-1][0]}
    for record in files.records:
        for name, value in record.items():
            other = "_loss/" in name or name.endswith(("_loss", "_runtime", "_second", "_items"))
            plain = name.startswith("eval_") and not other
            if plain and is_number(value):
                quality["metrics"][name] = value
    return quality


def _speed(files: RunFiles, use: TimeUse) -> dict[str, Any]:
    rates = _usual(files.curve("samples_per_second"))
    batch = files.summary.get("global_batch_size")
    step = files.last("measured_step_seconds")
    step = _usual(files.curve("step_seconds")) if step is None else step
    if step is None and rates and is_number(batch):  # of an older version
        step = float(batch) / rates  # type: ignore[arg-type]  # is_number has checked it
    prediction = (files.start.get("prediction") or {}).get("step_seconds")
    mfu = _usual(files.curve("mfu"))
    device = str(files.summary.get("device") or "")
    waits = use.parts.get(throughput.DATA, 0.0)
    return {
        "tokens_per_second": _usual(files.curve("tokens_per_second")),
        "samples_per_second": rates,
        "step_seconds": step,
        "predicted_step_seconds": prediction,
        "tflops_per_device": _usual(files.curve("tflops_per_device")),
        "mfu": mfu,
        "data_wait": waits / use.training if use.training > 0 else _usual(files.curve("data_wait")),
        "device": device,
        "peak_flops": files.summary.get("peak_flops"),
    }


def _usual(points: Points) -> float | None:
    """The median of a curve without its first value, in which kernels are compiled and caches filled."""
    values = [value for _, value in points[1:] or points]
    return statistics.median(values) if values else None


def _cost(files: RunFiles, use: TimeUse, price: float | None) -> dict[str, Any]:
    devices = files.summary.get("world_size")
    seconds = use.total
    if seconds <= 0:  # without a history
        seconds = max((float(record["time"]) for record in files.records if is_number(record.get("time"))), default=0.0)
    hours = seconds * devices / 3600 if is_number(devices) else None  # type: ignore[operator]
    return {
        "wall_seconds": seconds,
        "devices": devices,
        "device_hours": hours,
        "device_hour_price": price,
        "price": None if price is None or hours is None else price * hours,
    }


def _time(files: RunFiles, use: TimeUse) -> dict[str, Any]:
    return {
        "total_seconds": use.total,
        "parts": [
            {"name": name, "seconds": seconds, "share": seconds / use.total if use.total else 0.0}
            for name, seconds in use.parts.items()
        ],
        "between_processes_seconds": use.between,
        "repeated_steps": use.repeated_steps,
        "host_times": "cuda" in str(files.start.get("versions", {})) and files.summary.get("device") != "cpu",
        "profile": files.profile,
    }


def _memory(files: RunFiles) -> dict[str, Any]:
    points = files.curve("memory_gb")
    prediction = files.start.get("prediction") or {}
    on_gpu = str(files.summary.get("device") or "cpu") != "cpu"
    return {
        "on_gpu": on_gpu,
        "peak_bytes": max(value for _, value in points) * BYTES_PER_GB if points else None,
        "limit_bytes": files.start.get("memory_limit_bytes"),
        "predicted_bytes": prediction.get("device_bytes") or prediction.get("tensor_bytes"),
        "predicted_is_tensors": prediction.get("device_bytes") is None,
        "prediction_incomplete": prediction.get("incomplete") or "",
    }


def _ranks(files: RunFiles) -> dict[str, Any] | None:
    """Mean step times of the ranks over the windows of the straggler report; None without one."""
    windows = [window for window in files.stragglers if isinstance(window.get("ranks"), list)]
    if not windows:
        return None
    rows: dict[int, dict[str, list[float]]] = {}
    hosts: dict[int, str] = {}
    for window in windows:
        for place, rank in enumerate(window["ranks"]):
            row = rows.setdefault(rank, {})
            hosts[rank] = str(window.get("hosts", [])[place : place + 1] or "").strip("[]'")
            for part in ("step", "data", "communication", "work"):
                values: Sequence[float] = window.get(f"{part}_seconds", [])
                if place < len(values):
                    row.setdefault(part, []).append(values[place])
    return {
        "world_size": windows[-1].get("world_size"),
        "windows": len(windows),
        "notable": sum(bool(window.get("notable")) for window in windows),
        "slowest": windows[-1].get("slowest_rank"),
        "cause": windows[-1].get("slowest_cause"),
        "rows": [
            {"rank": rank, "host": hosts[rank], **{part: statistics.fmean(values) for part, values in row.items()}}
            for rank, row in sorted(rows.items())
        ],
    }


def _process(session: Any) -> dict[str, Any]:
    end = session.end or {}
    return {
        "began": session.began,
        "ended": session.time,
        "host": session.start.get("host"),
        "first_step": session.first_step,
        "last_step": session.step,
        "resumed_from": session.start.get("resumed_from"),
        "outcome": end.get("outcome") or "no word about its end",
        "devices": (session.start.get("summary") or {}).get("world_size"),
    }


def _results(files: RunFiles) -> dict[str, Any] | None:
    """The parts of ``results.json`` that a person reads: the evaluation of a recipe, and its sample."""
    if files.results is None:
        return None
    return {name: files.results[name] for name in ("evaluation", "sample", "seconds") if files.results.get(name)}


def read_report(directory: Path, device_hour_price: float | None = None) -> dict[str, Any]:
    """The report of the run in ``directory``.

    Raises:
        ConfigError: it is not the output directory of a run.
    """
    return report_of(RunFiles.read(directory), device_hour_price)


# Spikes of a curve: values far above those before, with the samples of their steps where the order is known.


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
    spikes: list[Spike] = []
    for name, ratio in _LEAST_RATIO.items():
        points = files.curve(name)
        spikes += find_spikes(name, points, ratio)
        usual = statistics.median([value for _, value in points]) if points else None
        steps = [step for step, _ in points]
        for step in files.not_finite(name):
            before = max((int(other) for other in steps if other < step), default=int(step) - 1)
            spikes.append(Spike(name, before + 1, int(step), None, usual))
    spikes.sort(key=lambda spike: -(spike.value / spike.usual if spike.value and spike.usual else float("inf")))
    chosen = sorted(spikes[:MOST_SPIKES], key=lambda spike: (spike.step, spike.name))
    return [asdict(with_samples(spike, files)) for spike in chosen]


def find_spikes(name: str, points: Points, ratio: float) -> list[Spike]:
    """The values that are more than ``ratio`` times, and many deviations above, the median of those before."""
    recent: deque[float] = deque(maxlen=_WINDOW)
    spikes: list[Spike] = []
    before = 0
    for step, value in points:
        if len(recent) >= _FEWEST:
            usual = statistics.median(recent)
            deviation = statistics.median(abs(one - usual) for one in recent)
            if value > max(usual + _DEVIATIONS * deviation, ratio * usual) and value > 0:
                first = before + 1 if name != "grad_norm" else int(step)
                spikes.append(Spike(name, min(first, int(step)), int(step), value, usual))
        recent.append(value)
        before = int(step)
    return spikes


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

"""The evaluation of the overhead measurements: a check of equal work, medians, intervals, a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

BARE, CONTROL, COUNTING = "bare loop", "bare loop again", "bare loop that counts"
OURS, THEIRS = "ds_trainer", "transformers"
LOOPS = (BARE, CONTROL, COUNTING, OURS, THEIRS)
CLOCKS = {"wall": "Wall clock", "cpu": "CPU time of a rank"}
TRAINERS = (OURS, THEIRS)
SEED = 42
TOLERANCE = 1e-4  # relative; the loops do the same arithmetic, summed in another order


def same_work(
    world: int, accumulation: int, losses: dict[str, list[torch.Tensor]], weights: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Largest relative differences of the losses of all micro-batches, and of the final weights, to the bare loop's.

    The bare loop divides the summed loss by the tokens of its micro-batch, the others by those of the global batch.
    """
    of_all = world * accumulation
    share = {BARE: 1, CONTROL: 1, COUNTING: of_all, OURS: of_all, THEIRS: of_all}
    wanted = torch.stack(losses[BARE]).double()
    report: dict[str, Any] = {
        "micro_batches": len(wanted),
        "first_loss": float(wanted[0]),
        "last_loss": float(wanted[-1]),
    }
    far: list[float] = []
    for name in LOOPS[1:]:
        found = torch.stack(losses[name]).double() * share[name]
        same_length = found.shape == wanted.shape
        report[name] = {
            "losses": float(((found - wanted) / wanted).abs().max()) if same_length else float("inf"),
            "weights": float((weights[name] - weights[BARE]).norm() / weights[BARE].norm()),
        }
        far += report[name].values()
    # Not max(far) <= TOLERANCE: max() passes over a nan.
    return {**report, "tolerance": TOLERANCE, "passed": all(distance <= TOLERANCE for distance in far)}


def summary(times: dict[str, Any]) -> dict[str, Any]:
    """Medians and quartiles of each loop, and of its differences within the same round: of each loop to the bare one,
    and of the trainers to the one that counts.
    """
    values = {name: np.asarray(times[name]) for name in LOOPS}
    return {
        "loops": {
            name: {
                "median_ms": float(np.median(of_loop)),
                "quartiles_ms": np.quantile(of_loop, [0.25, 0.75]).tolist(),
            }
            for name, of_loop in values.items()
        },
        "overhead": {name: _difference(values[name], values[BARE]) for name in LOOPS[1:]},
        "over_counting": {name: _difference(values[name], values[COUNTING]) for name in TRAINERS},
    }


def _difference(values: Any, base: Any) -> dict[str, Any]:
    differences = values - base
    resamples = np.random.default_rng(SEED).choice(differences, (2000, len(differences)))
    median = float(np.median(differences))
    return {
        "median_ms": median,
        "interval_95_ms": np.quantile(np.median(resamples, axis=1), [0.025, 0.975]).tolist(),
        "quartiles_ms": np.quantile(differences, [0.25, 0.75]).tolist(),
        "percent": 100 * median / float(np.median(base)),
    }


def tables(cases: Sequence[dict[str, Any]]) -> str:
    """The results as two Markdown tables for each clock, milliseconds a micro-step: differences to each bare loop."""
    parts = []
    for clock, title in CLOCKS.items():
        parts.append(f"{title}:\n\n{_table(cases, clock, BARE, 'overhead', LOOPS[1:])}")
        parts.append(
            f"{title}, differences to the loop that counts:\n\n"
            + _table(cases, clock, COUNTING, "over_counting", TRAINERS)
        )
    return "\n\n".join(parts)


def _table(cases: Sequence[dict[str, Any]], clock: str, base: str, kind: str, names: Sequence[str]) -> str:
    lines = [
        f"| model | ranks | ZeRO | accum. | {base} | {' | '.join(names)} | same work |",
        f"|{'---|' * (6 + len(names))}",
    ]
    for case in cases:
        found = case[clock][kind]
        middle = case[clock]["loops"][base]["median_ms"]
        cells = ["{model} | {world} | {stage} | {accumulation}".format(**case), f"{middle:.2f}"]
        for name in names:
            low, high = found[name]["interval_95_ms"]
            cells.append("{median_ms:+.2f}".format(**found[name]) + f" [{low:+.2f}, {high:+.2f}]")
            cells[-1] += " {percent:+.1f} %".format(**found[name])
        lines.append(f"| {' | '.join(cells)} | {'yes' if case['check']['passed'] else 'NO'} |")
    return "\n".join(lines)

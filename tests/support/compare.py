"""How near two trajectories are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.oracle import Trajectory


def relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Largest relative difference, element by element; infinite where the lengths differ or something is nan."""
    if len(found) != len(wanted):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        difference = abs(a - b) / max(abs(b), 1e-12)
        if not difference <= worst:
            worst = difference if difference == difference else float("inf")
    return worst


def weight_distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest ``|a - b| / |b|`` over the tensors, in the 2-norm."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


def distances(found: Trajectory, wanted: Trajectory) -> dict[str, float]:
    """Relative differences of everything that is compared."""
    return {
        "losses": relative(found.losses, wanted.losses),
        "grad_norms": relative(found.grad_norms, wanted.grad_norms),
        "learning_rates": max((abs(a - b) for a, b in zip(found.learning_rates, wanted.learning_rates, strict=True))),
        "weights": weight_distance(found.weights, wanted.weights),
    }


def assert_equal(found: Trajectory, wanted: Trajectory, tolerance: float = 1e-5) -> None:
    """Everything agrees to ``tolerance``, relative."""
    too_large = {name: value for name, value in distances(found, wanted).items() if not value <= tolerance}
    assert not too_large, f"differences above {tolerance}: {too_large}"

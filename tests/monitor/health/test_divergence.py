"""How many incidents are too many, and what a spike is."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.monitor.health.divergence import SkippedSteps, SpikeDetector


def skipped_at(*tried: int, limit: int = 2, window: int = 10) -> SkippedSteps:
    incidents = SkippedSteps(limit, window)
    for step in tried:
        incidents.tried = step
        incidents.record()
    return incidents


def test_skipped_steps_are_counted_in_a_window() -> None:
    assert not skipped_at(1, 5).limit_exceeded
    assert skipped_at(1, 5, 10).limit_exceeded
    assert not skipped_at(1, 5, 11).limit_exceeded  # ten steps: 2 to 11
    assert skipped_at(1, limit=0).limit_exceeded


def test_incidents_are_plain_data() -> None:
    before = skipped_at(3, 4)
    before.skipped, before.rollbacks = 2, 1
    after = SkippedSteps(2, 10)
    after.restore(json.loads(json.dumps(before.to_json())))
    assert after.to_json() == before.to_json()
    after.tried = 5
    assert (after.record(), after.limit_exceeded) == (3, True)


def detector(*losses: float, factor: float = 2.0, window: int = 8) -> SpikeDetector:
    found = SpikeDetector(factor, window)
    for loss in losses:
        found.add(loss)
    return found


def test_a_spike_is_above_the_factor() -> None:
    seen = detector(2.0, 1.0, 3.0, 2.0, 2.0)
    assert (seen.is_spike(4.0), seen.is_spike(4.01)) == (False, True)
    assert not seen.is_spike(0.0)


def test_the_first_losses_are_never_spikes() -> None:
    assert not detector(1.0, 1.0, 1.0, 1.0).is_spike(100.0)
    assert detector(1.0, 1.0, 1.0, 1.0, 1.0).is_spike(100.0)
    assert SpikeDetector(2.0, 100).needed == 25
    assert SpikeDetector(2.0, 3).needed == 3


def test_negative_losses_have_spikes_too() -> None:
    seen = detector(*[-2.0] * 5)
    assert (seen.is_spike(-0.1), seen.is_spike(0.1)) == (False, True)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_not_a_spike(loss: float) -> None:
    assert not detector(*[1.0] * 8).is_spike(loss)


def test_one_outlier_does_not_move_the_median() -> None:
    assert detector(1.0, 1.0, 1.0, 50.0, 1.0).is_spike(3.0)


def test_a_short_window_forgets() -> None:
    losses = [*[1.0] * 8, *[5.0] * 8]
    assert not detector(*losses, window=8).is_spike(6.0)
    assert detector(*losses[:15], window=16).is_spike(6.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=8), st.floats(-1e6, 1e6))
def test_a_restored_detector_decides_the_same(losses: list[float], loss: float) -> None:
    before = detector(*losses)
    after = detector()
    after.restore(json.loads(json.dumps(before.to_json())))
    assert after.is_spike(loss) == before.is_spike(loss)

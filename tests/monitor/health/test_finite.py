"""How many incidents are too many, and what a spike is."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.monitor.health.finite import Incidents, SpikeDetector


def at(*tried: int, limit: int = 2, window: int = 10) -> Incidents:
    incidents = Incidents(limit, window)
    for step in tried:
        incidents.tried = step
        incidents.note()
    return incidents


def test_a_window_counts() -> None:
    assert not at(1, 5).too_many
    assert at(1, 5, 10).too_many
    assert not at(1, 5, 11).too_many  # ten steps: 2 to 11
    assert at(1, limit=0).too_many


def test_incidents_are_plain_data() -> None:
    before = at(3, 4)
    before.skipped, before.rollbacks = 2, 1
    after = Incidents(2, 10)
    after.restore(json.loads(json.dumps(before.to_json())))
    assert after.to_json() == before.to_json()
    after.tried = 5
    assert (after.note(), after.too_many) == (3, True)


def detector(*losses: float, factor: float = 2.0, window: int = 8) -> SpikeDetector:
    found = SpikeDetector(factor, window)
    for loss in losses:
        found.add(loss)
    return found


def test_a_spike_is_above_the_factor() -> None:
    seen = detector(2.0, 1.0, 3.0, 2.0, 2.0)
    assert (seen.is_spike(4.0), seen.is_spike(4.01)) == (False, True)
    assert not seen.is_spike(0.0)


def test_nothing_is_a_spike_at_the_beginning() -> None:
    assert not detector(1.0, 1.0, 1.0, 1.0).is_spike(100.0)
    assert detector(1.0, 1.0, 1.0, 1.0, 1.0).is_spike(100.0)
    assert SpikeDetector(2.0, 100).needed == 25
    assert SpikeDetector(2.0, 3).needed == 3


def test_a_loss_below_zero_has_spikes_too() -> None:
    seen = detector(*[-2.0] * 5)
    assert (seen.is_spike(-0.1), seen.is_spike(0.1)) == (False, True)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_no_spike(loss: float) -> None:
    assert not detector(*[1.0] * 8).is_spike(loss)


def test_one_outlier_does_not_move_the_median() -> None:
    assert detector(1.0, 1.0, 1.0, 50.0, 1.0).is_spike(3.0)


def test_a_short_window_forgets() -> None:
    losses = [*[1.0] * 8, *[5.0] * 8]
    assert not detector(*losses, window=8).is_spike(6.0)
    assert detector(*losses[:15], window=16).is_spike(6.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=8), st.floats(-1e6, 1e6))
def test_a_restored_detector_decides_alike(losses: list[float], loss: float) -> None:
    before = detector(*losses)
    after = detector()
    after.restore(json.loads(json.dumps(before.to_json())))
    assert after.is_spike(loss) == before.is_spike(loss)

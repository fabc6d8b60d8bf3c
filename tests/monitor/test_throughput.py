"""Rates are plain divisions of what was counted by the time that the clock says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.monitor.throughput import Rates, ThroughputMeter, TimedIterator


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_window_counts_from_the_last_read() -> None:
    clock = Clock()
    meter = ThroughputMeter(clock)
    clock.seconds += 2.0
    meter.add(tokens=1000, samples=8)
    assert meter.read() == Rates(seconds=2.0, tokens_per_second=500.0, samples_per_second=4.0, steps_per_second=0.5)
    clock.seconds += 4.0
    meter.add(tokens=400, samples=4)
    meter.add(tokens=400, samples=4)
    assert meter.read() == Rates(seconds=4.0, tokens_per_second=200.0, samples_per_second=2.0, steps_per_second=0.5)
    assert meter.overall() == Rates(
        seconds=6.0, tokens_per_second=300.0, samples_per_second=16 / 6, steps_per_second=0.5
    )


def test_the_overall_rate_does_not_change_the_window() -> None:
    clock = Clock()
    meter = ThroughputMeter(clock)
    meter.add(tokens=100, samples=1)
    clock.seconds += 1.0
    meter.overall()
    clock.seconds += 1.0
    assert meter.read().tokens_per_second == 50.0


def test_several_steps_at_once() -> None:
    clock = Clock()
    meter = ThroughputMeter(clock)
    meter.add(tokens=10, samples=2, steps=5)
    clock.seconds += 1.0
    assert meter.read().steps_per_second == 5.0


def test_no_time_has_passed() -> None:
    meter = ThroughputMeter(Clock())
    meter.add(tokens=10, samples=1)
    assert meter.read() == meter.overall() == Rates(0.0, 0.0, 0.0, 0.0)


def test_a_pause_does_not_count_even_when_it_is_nested_or_fails() -> None:
    clock = Clock()
    meter = ThroughputMeter(clock)
    clock.seconds += 1.0
    with meter.paused():
        clock.seconds += 50.0
        with meter.paused():
            clock.seconds += 50.0
        clock.seconds += 50.0
        meter.add(tokens=300, samples=3)
        assert meter.overall().seconds == 1.0
    clock.seconds += 2.0
    with pytest.raises(KeyError), meter.paused():
        clock.seconds += 7.0
        raise KeyError
    assert meter.read() == Rates(seconds=3.0, tokens_per_second=100.0, samples_per_second=1.0, steps_per_second=1 / 3)


@given(st.lists(st.tuples(st.floats(0.01, 1e4), st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_windows_add_up_to_the_total(work: list[tuple[float, int, int]]) -> None:
    clock = Clock()
    clock.seconds = 0.0
    meter = ThroughputMeter(clock)
    windows = []
    for seconds, tokens, samples in work:
        clock.seconds += seconds
        meter.add(tokens, samples)
        windows.append(meter.read())
    total = meter.overall()
    assert total.seconds == pytest.approx(sum(window.seconds for window in windows))
    assert total.tokens_per_second * total.seconds == pytest.approx(sum(tokens for _, tokens, _ in work))
    assert sum(w.tokens_per_second * w.seconds for w in windows) == pytest.approx(sum(tokens for _, tokens, _ in work))
    assert total.samples_per_second * total.seconds == pytest.approx(sum(samples for *_, samples in work))
    assert total.steps_per_second * total.seconds == pytest.approx(len(work))


def test_the_real_clock_moves() -> None:
    meter = ThroughputMeter()
    meter.add(tokens=1, samples=1)
    while meter.overall().seconds == 0.0:
        pass
    assert meter.read().tokens_per_second > 0.0


def test_flops_and_data_wait_are_measured() -> None:
    clock = Clock()
    meter = ThroughputMeter(clock)
    clock.seconds += 2.0
    meter.add(waited=0.5)
    meter.add(steps=0, flops=6e12)
    rates = meter.read()
    assert (rates.flops_per_second, rates.data_wait, rates.steps_per_second) == (3e12, 0.25, 0.5)
    clock.seconds += 1.0
    meter.add()
    rates = meter.read()
    assert (rates.flops_per_second, rates.data_wait) == (0.0, 0.0)
    assert meter.overall().data_wait == pytest.approx(0.5 / 3)


def test_an_iterator_records_how_long_it_blocked() -> None:
    clock = Clock()

    def source() -> Iterator[int]:
        for number in range(2):
            clock.seconds += 3.0
            yield number
        clock.seconds += 1.0

    data = TimedIterator(source(), clock)
    assert next(data) == 0
    clock.seconds += 100.0  # the caller's own work
    assert data.seconds == 3.0
    assert list(data) == [1]
    assert data.seconds == 7.0  # finding the end took time as well

"""Numbers as a person reads them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_trainer.utils.units import human_count, human_duration, human_operations


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (1, "1"), (842, "842"), (0.5, "0.5"), (3.14159, "3.14"), (999.4, "999"), (999.6, "1k"),
        (1000, "1k"), (1010, "1.01k"), (12_345, "12.3k"), (99_949, "99.9k"), (99_951, "100k"), (999_999, "1M"),
        (25_300_000, "25.3M"), (7_000_000_000, "7B"), (1.01e12, "1.01T"), (5e15, "5000T"), (-12_345, "-12.3k"),
        (math.nan, "nan"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_human_count(number: float, text: str) -> None:
    assert human_count(number) == text


@given(st.floats(1.0, 9e14))
def test_human_count_is_within_half_a_percent(number: float) -> None:
    text = human_count(number)
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBT")) * factor == pytest.approx(number, rel=0.00501)
    assert len(text) <= 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"), (0.424, "0.42 s"), (9.996, "10.0 s"), (12.34, "12.3 s"), (59.94, "59.9 s"),
        (59.96, "1 min 00 s"), (200, "3 min 20 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"), (86_399, "1 d 00 h"), (4 * 86_400 + 7_300, "4 d 02 h"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_human_duration(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 FLOP"), (842, "842 FLOP"), (1500, "1.5 kFLOP"), (6.3e9, "6.3 GFLOP"), (989.4e12, "989 TFLOP")],
)
def test_human_operations(number: float, text: str) -> None:
    assert human_operations(number) == text

"""Metrics look as users of transformers know them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.trainer_pt_utils import metrics_format

from ds_trainer.monitor.step_line import format_metrics, metrics_table

METRICS: dict[str, Any] = {
    "train_runtime": 3723.459,
    "eval_runtime": 0.004,
    "long_runtime": 200_000.5,
    "total_flos": 1.5e15,
    "train_loss": 2.345678,
    "train_samples_per_second": 12.0,
    "init_mem_cpu_alloc_delta": 1_364_197_376,
    "train_mem_cpu_alloc_delta": -3_000_000,
    "before_init_mem_gpu": 0,
    "epoch": 3,
    "name": "a run",
}


def test_values_as_transformers_formats_them() -> None:
    assert format_metrics(METRICS) == metrics_format(METRICS)


@given(st.floats(0, 1e6), st.floats(0, 1e24), st.integers(-(2**40), 2**40), st.floats(allow_nan=False, width=32))
def test_any_value_as_transformers_formats_it(seconds: float, flos: float, size: int, value: float) -> None:
    metrics = {"x_runtime": seconds, "total_flos": flos, "x_mem_cpu_alloc_delta": size, "loss": value, "count": size}
    assert format_metrics(metrics) == metrics_format(metrics)


def test_formatting_does_not_change_the_values() -> None:
    before = dict(METRICS)
    format_metrics(METRICS)
    assert before == METRICS


def test_metrics_of_loading_weights_are_formatted() -> None:
    metrics = {
        "load_seconds": 69.4321, "load_bytes_read": 16_060_000_000, "load_host_peak_bytes": 2_300_000,
        "load_device_peak_bytes": 0, "eval_load_seconds": 1.23456, "payload_bytes": 12345
    }  # fmt: skip
    assert format_metrics(metrics) == {
        "load_seconds": "0:01:09.43", "load_bytes_read": "16.1 GB", "load_host_peak_bytes": "2.3 MB",
        "load_device_peak_bytes": "0 B", "eval_load_seconds": 1.2346, "payload_bytes": 12345
    }  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "lines"),
    [
        ({}, ["***** eval metrics *****"]),
        (
            {"total_flos": 3 * 2**30, "loss": 1.0, "epoch": 12},
            ["***** eval metrics *****", "  epoch      =  12", "  loss       = 1.0", "  total_flos = 3GF"],
        ),
    ],
)
def test_the_table(metrics: dict[str, Any], lines: list[str]) -> None:
    assert metrics_table("eval", metrics).splitlines() == lines

"""One log event as one line."""

from __future__ import annotations

import math

import pytest

from ds_trainer.monitor.step_line import phrases, step_line
from ds_trainer.utils.secrets import register_secrets_of


def test_a_training_line() -> None:
    logs = {
        "loss": 2.3141, "grad_norm": 0.8449, "learning_rate": 2.9e-3, "epoch": 0.1342,
        "tokens_per_second": 12_345.6, "memory_gb": 0.812
    }  # fmt: skip
    assert step_line(logs, 40, 300) == (
        "step 40/300  epoch 0.13  loss 2.314  grad norm 0.84  lr 2.9e-03  12.3k tok/s  0.81 GB"
    )


def test_speed_and_mfu_are_shown() -> None:
    logs = {"samples_per_second": 51.5, "tflops_per_device": 412.34, "mfu": 0.4168, "data_wait": 0.0042}
    assert phrases(logs) == ["51.5 samples/s", "412 TFLOP/s", "MFU 42 %", "data wait 0.4 %"]
    assert phrases({"tflops_per_device": 0.01234, "mfu": 0.0}) == ["0.0123 TFLOP/s", "MFU 0.0 %"]
    assert phrases({"tflops_per_device": 0.00032, "data_wait": 1.0}) == ["3.2e-04 TFLOP/s", "data wait 100 %"]


def test_evaluation_and_summary() -> None:
    logs = {"eval_loss": 2.25, "eval_runtime": 3.21, "eval_samples_per_second": 51.5, "eval_steps_per_second": 6.4}
    assert phrases(logs) == ["eval loss 2.250", "eval time 3.21 s", "eval 51.5 samples/s", "eval 6.4 steps/s"]
    assert phrases({"train_runtime": 200.0, "train_loss": 2.5}) == ["train time 3 min 20 s", "train loss 2.500"]


def test_the_number_of_steps_may_be_unknown() -> None:
    assert step_line({"loss": 1.0}, 7, 0) == "step 7  loss 1.000"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", math.nan, "loss nan"),
        ("loss", math.inf, "loss inf"),
        ("loss", 0.0, "loss 0.000"),
        ("loss", 0.00042, "loss 4.20e-04"),
        ("loss", -0.5, "loss -0.500"),
        ("grad_norm", 0.004, "grad norm 4.00e-03"),
        ("loss", "broken", "loss broken"),  # a name of ours with a value that is no number
        ("auxloss", 1.23456, "auxloss 1.235"),  # ends like a known name, but is not one
        ("eval_accuracy", 0.912345, "eval accuracy 0.9123"),
        ("num_input_tokens_seen", 123_456, "123k tokens seen"),
        ("train_mem_cpu_alloc_delta", 45 * 2**20, "train mem cpu alloc delta 47.2 MB"),
        ("before_init_mem_cpu", 345 * 2**20, "before init mem cpu 362 MB"),
        ("load_seconds", 69.4, "load 1 min 09 s"),
        ("load_bytes_read", 16_060_000_000, "load 16.1 GB read"),
        ("load_host_peak_bytes", 2_300_000, "load host peak 2.3 MB"),
        ("load_device_peak_bytes", 0, "load device peak 0 B"),
        ("flag", True, "flag True"),
        ("note", "x" * 12, "note xxxxxxxxxx... (12 characters)"),
    ],
)
def test_one_value(name: str, value: object, text: str) -> None:
    assert phrases({name: value}, max_str_len=10) == [text]


def test_internal_metrics_are_left_out() -> None:
    assert step_line({"total_flos": 1e18, "step": 3, "loss": 1.0}, 3, 9) == "step 3/9  loss 1.000"


def test_torch_and_numpy_scalars_look_like_numbers() -> None:
    import numpy
    import torch

    logs = {"loss": torch.tensor(2.5), "grad_norm": numpy.float32(0.5), "epoch": torch.tensor(0.25)}
    assert step_line(logs, 1, 2) == "step 1/2  epoch 0.25  loss 2.500  grad norm 0.50"


def test_a_line_has_at_most_110_characters_with_the_most_important_values_first() -> None:
    """That of a run of preference optimization: the loss and the remaining time stay, whatever else is logged."""
    logs = {
        **{f"rewards/margin_{number}": number / 3 for number in range(12)},
        "samples_per_second": 51.5, "step_seconds": 0.16, "tflops_per_device": 0.003, "data_wait": 0.004, "epoch": 0.5,
        "tokens_per_second": 12_345.6, "memory_gb": 0.812, "learning_rate": 2.9e-3, "grad_norm": 0.84, "loss": 2.3
    }  # fmt: skip
    assert step_line(logs, 40, 300, end="ETA 3 min 20 s") == (
        "step 40/300  epoch 0.50  loss 2.300  grad norm 0.84  lr 2.9e-03  (+14 in metrics.jsonl)  ETA 3 min 20 s"
    )
    for size in range(1, 130, 7):
        assert len(step_line({"loss": 1.0, "note": "x" * size, "eval_loss": 2.0}, 10**9, 10**9, 200, "ETA 1 s")) <= 110


def test_a_single_long_value_is_cut_and_not_dropped() -> None:
    line = step_line({"note": "x" * 300}, 1, 2, 300)
    assert len(line) == 110 and line.startswith("step 1/2  note xxx") and line.endswith("...")


def test_secrets_in_values_do_not_make_a_line_longer_than_it_may_be() -> None:
    register_secrets_of({"api_key": "a-secret-of-some-length"})
    assert "a-secret" not in step_line({"note": "key a-secret-of-some-length"}, 1, 2)


def test_what_only_describes_the_start_and_the_planner_is_not_on_the_console() -> None:
    logs = {
        "train_runtime": 200.0, "train_loss": 2.5, "train_tokens_per_second": 3000.0, "train_samples_per_second": 23.0,
        "train_steps_per_second": 3.0, "load_seconds": 3.0, "load_bytes_read": 100, "packing_fill": 0.98,
        "predicted_step_seconds": 0.04, "measured_step_seconds": 0.58, "step_seconds_error": 15.35,
        "predicted_peak_memory_bytes": 1.0, "peak_memory_error": 0.1, "train_wer_error": 0.25
    }  # fmt: skip
    assert step_line(logs, 3, 3) == (
        "step 3/3  train time 3 min 20 s  train loss 2.500  train 3k tok/s  train wer error 0.25"
    )
    assert step_line({"loss": 1.0, "data_wait": 0.5}, 3, 3) == "step 3/3  loss 1.000  data wait 50 %"


def test_losses_of_sources_come_last() -> None:
    logs = {"loss": 1.5, **{f"loss/s{number}": number / 2 for number in range(8)}, "accuracy": 1.0}
    assert step_line(logs, 1, 2) == (
        "step 1/2  loss 1.500  accuracy 1  loss/s0 0  loss/s1 0.5  loss/s2 1  loss/s3 1.5  (+4 in metrics.jsonl)"
    )

"""The header before the first step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ds_trainer.monitor.header import RunSummary, header_lines, header_text

SUMMARY = RunSummary(
    model_name="LlamaForCausalLM",
    parameters_total=25_300_000,
    parameters_trainable=25_300_000,
    world_size=16,
    data_parallel=8,
    tensor_parallel=2,
    context_parallel=1,
    sequence_parallel=1,
    expert_parallel=1,
    micro_batch_size=4,
    accumulation_steps=2,
    global_batch_size=64,
    zero_stage=2,
    precision="bf16",
    optimizer="AdamW",
    max_steps=1200,
    num_train_epochs=3.0,
    device="NVIDIA H100",
    output_dir="runs/first",
    num_train_samples=25_600,
    num_eval_samples=512,
)


def test_the_complete_header() -> None:
    assert header_lines(SUMMARY) == [
        "ds_trainer",
        "  model   LlamaForCausalLM, 25.3M parameters, all trainable",
        "  layout  16 ranks = dp 8 x tp 2 x cp 1 x sp 1",
        "  batch   global batch 64 = 4 per device x 2 accumulation x 8 data parallel",
        "  engine  ZeRO 2, bf16, AdamW",
        "  data    25,600 samples, 512 for evaluation",
        "  steps   1,200 optimizer steps, 3 epochs",
        "  device  16 x NVIDIA H100",
        "  output  runs/first",
    ]
    assert header_text(SUMMARY).split("\n") == header_lines(SUMMARY)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"parameters_trainable": 253_000}, "LlamaForCausalLM, 25.3M parameters, 253k trainable (1 %)"),
        ({"parameters_total": 0, "parameters_trainable": 0}, "LlamaForCausalLM, 0 parameters, all trainable"),
        ({"world_size": 1, "data_parallel": 1, "tensor_parallel": 1}, "1 rank = dp 1 x tp 1 x cp 1 x sp 1"),
        ({"offload_optimizer": "cpu"}, "ZeRO 2, bf16, AdamW, optimizer states on cpu"),
        (
            {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "nvme"},
            "ZeRO 3, bf16, AdamW, optimizer states on cpu, parameters on nvme",
        ),
        ({"num_train_samples": None, "num_eval_samples": None}, "a stream of unknown length"),
        ({"num_train_epochs": 1}, "1,200 optimizer steps, 1 epoch"),
        ({"num_train_epochs": 0.254}, "1,200 optimizer steps, 0.25 epochs"),
        ({"num_train_epochs": 0.0048}, "1,200 optimizer steps, 0.0048 epochs"),
        ({"num_train_epochs": 10.0}, "1,200 optimizer steps, 10 epochs"),
        (
            {"resumed_from": "runs/first/checkpoint-400", "resumed_step": 400},
            "from runs/first/checkpoint-400, step 400",
        ),
        ({"estimate": "11.2 GB of 80 GB on a device"}, "11.2 GB of 80 GB on a device"),
        ({"planned": "zero_stage=3 (parallelism='auto')"}, "zero_stage=3 (parallelism='auto')"),
        ({"overrides": "zero_stage=3 (ds-trainer run --set)"}, "zero_stage=3 (ds-trainer run --set)"),
    ],
)
def test_header_variants(changes: dict[str, object], line: str) -> None:
    lines = header_lines(dataclasses.replace(SUMMARY, **changes))  # type: ignore[arg-type]
    assert line in [text.split(maxsplit=1)[1] for text in lines[1:]]


def test_values_stay_in_one_column() -> None:
    lines = header_lines(dataclasses.replace(SUMMARY, resumed_from="x"))[1:]
    columns = {text.index(text.split(maxsplit=1)[1], 2 + len(text.split()[0])) for text in lines}
    assert columns == {11}


def compute_line(**changes: Any) -> str:
    lines = header_lines(dataclasses.replace(SUMMARY, **changes))
    return next((line.strip() for line in lines if line.strip().startswith("compute")), "")


def test_flops_per_token_and_peak_flops_are_shown() -> None:
    assert compute_line() == ""
    counted = {"flops_per_token": 4.2e9, "flops_source": "counted from the architecture"}
    cost = "compute  4.2 GFLOP per token without attention (counted from the architecture)"
    assert compute_line(**counted) == f"{cost}; no MFU: unknown peak"
    assert compute_line(**counted, peak_flops=989.4e12, number_format="bf16") == f"{cost}; peak 989 TFLOP/s in bf16"

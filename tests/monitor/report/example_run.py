"""The files of a run in which everything has happened, to look at its report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0
STEPS = 600


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def example_run(directory: Path) -> Path:
    """A run on eight H100s that was killed once and resumed: spikes, evaluations, stragglers, a data card."""
    directory.mkdir(parents=True, exist_ok=True)
    write_lines(directory / "metrics.jsonl", _metrics())
    write_lines(directory / "run_history.jsonl", _history())
    write_lines(directory / "health" / "stragglers.jsonl", _stragglers())
    (directory / "data_card.json").write_text(json.dumps(_data()))
    return directory


def _metrics() -> list[dict[str, Any]]:
    noise, records = random.Random(0), []
    for step in range(1, STEPS + 1):
        loss = 1.1 + 1.6 * math.exp(-step / 90) + noise.gauss(0, 0.03)
        norm = 0.6 + 2.5 * math.exp(-step / 40) + abs(noise.gauss(0, 0.08))
        if step in (210, 433):
            loss, norm = loss * 2.1, norm * 9
        record: dict[str, Any] = {"step": step, "epoch": step / 1000, "time": 2.1 * step, "loss": loss}
        record["grad_norm"] = norm
        record["learning_rate"] = 2e-5 * min(step / 30, 0.5 * (1 + math.cos(math.pi * step / STEPS)) + 0.02)
        record["tokens_per_second"] = 41_000 + noise.gauss(0, 700) - (15_000 if step % 100 == 1 else 0)
        record["samples_per_second"] = 31.0 + noise.gauss(0, 0.5)
        record["mfu"] = record["tokens_per_second"] / 110_000
        record["tflops_per_device"] = 989 * record["mfu"]
        record["data_wait"] = 0.13
        record["memory_gb"] = 31.4 + min(step, 20) * 0.05
        if step == 300:
            record["loss"], record["loss_nonfinite"] = None, "nan"
        records.append(record)
        if step % 100 == 0:
            value = 1.25 + 1.2 * math.exp(-step / 80) + max(0, step - 300) * 0.0004
            records.append({"step": step, "epoch": step / 1000, "time": 2.1 * step, "eval_loss": value})
    return records


def _start(**changes: Any) -> dict[str, Any]:
    summary = {
        "model_name": "LlamaForCausalLM", "parameters_total": 8_030_000_000, "parameters_trainable": 8_030_000_000,
        "world_size": 8, "global_batch_size": 64, "max_steps": STEPS, "device": "NVIDIA H100 80GB HBM3",
        "weights": "291 tensors are equal to those of /models/llama-8b", "peak_flops": 989.4e12
    }  # fmt: skip
    return {
        "event": "start", "time": BEGAN + 95, "step": 0, "process_started": BEGAN, "train_called": BEGAN + 40,
        "command": "ds-trainer train recipe.yaml --arguments.learning_rate 2e-5", "directory": "/data/project",
        "git": {"commit": "4f2c9a7d1e0b8c6a5f3d2e1b0a9c8d7e6f5a4b3c", "branch": "main", "changed_files": 2},
        "versions": {"python": "3.11.7", "ds_trainer": "0.1.0", "torch": "2.13.0+cu130", "cuda": "13.0"},
        "host": "node-17", "system": "Linux, 192 CPUs, 2.16 TB", "restarts": 0, "pid": 4242, "run_name": "chat-8b",
        "arguments": [
            {"name": "learning_rate", "value": 2e-5, "default": 5e-5, "origin": "command line"},
            {"name": "zero_stage", "value": 3, "default": None, "origin": "recipe.yaml:14"},
            {"name": "packing", "value": True, "default": False, "origin": "recipe.yaml:15"}
        ],
        "header": [["model", "LlamaForCausalLM, 8.03B parameters, all trainable"]], "summary": summary,
        "memory_limit_bytes": 85_000_000_000, "device_hour_price": 2.5,
        "prediction": {"step_seconds": [1.7, 2.0, 2.4], "tensor_bytes": 33e9, "device_bytes": 36e9, "incomplete": ""},
        "order": {"samples": 64_000, "seed": 42, "shuffle": True, "steps_per_epoch": 1000, "samples_per_step": 64},
        **changes
    }  # fmt: skip


def _history() -> list[dict[str, Any]]:
    seconds = {"start of the training": 3.0, "data": 140.0, "checks of the first batch": 6.0, "forward": 180.0,
               "backward": 360.0, "communication": 120.0, "optimizer": 30.0, "between steps": 9.0,
               "evaluation": 40.0, "saving": 14.0}  # fmt: skip
    text = "Step 300: the loss is not finite on rank 3; samples 17, 90 of the dataset. Its update is skipped."
    return [
        _start(),
        {"event": "message", "time": BEGAN + 60, "level": "INFO", "check": "self-test",
         "text": "Self-test: the gradient (ZeRO-3 bf16) is equal to plain PyTorch (error 2.1e-03, tolerance 0.02)."},
        {"event": "message", "time": BEGAN + 99, "level": "INFO", "check": "packing",
         "text": "packing: packed rows give the losses of the samples alone (largest difference 3.1e-07)."},
        {"event": "message", "time": BEGAN + 800, "level": "WARNING", "step": 300, "text": text},
        {"event": "progress", "time": BEGAN + 1005, "step": 430, "seconds": seconds},
        _start(step=400, time=BEGAN + 1300, process_started=BEGAN + 1210, train_called=BEGAN + 1240,
               resumed_from="/runs/chat-8b/checkpoint-400", resumed_written=BEGAN + 940),
        {"event": "end", "time": BEGAN + 1790, "step": STEPS, "outcome": "finished",
         "seconds": {name: value * 0.5 for name, value in seconds.items()}}
    ]  # fmt: skip


def _stragglers() -> list[dict[str, Any]]:
    steps, data = [2.05] * 8, [0.1] * 7 + [0.6]
    waits = [0.5] * 7 + [0.02]
    return [
        {
            "step": step, "world_size": 8, "ranks": list(range(8)), "hosts": ["node-17"] * 8, "step_seconds": steps,
            "data_seconds": data, "communication_seconds": waits,
            "work_seconds": [s - d - w for s, d, w in zip(steps, data, waits, strict=True)],
            "slowest_rank": 7, "slowest_cause": "data loading", "notable": True
        }
        for step in range(50, STEPS + 1, 50)
    ]  # fmt: skip


def _data() -> dict[str, Any]:
    pieces = [
        {"text": "<|user|>\nWhat is a loss spike?\n", "trained": False},
        {"text": "<|assistant|>\n", "trained": False},
        {"text": "A step whose loss is far above those before it.<|end|>", "trained": True},
    ]
    return {
        "figures": {"samples": 64_000, "tokens": 81_000_000, "trained share": "61 %", "longest sample": 8192},
        "sources": [
            {"name": "chats.jsonl", "samples": 48_000, "tokens": 70_000_000, "truncated": 12, "duplicates": 31},
            {"name": "code.parquet", "samples": 16_000, "tokens": 11_000_000, "truncated": 0, "duplicates": 0},
        ],
        "lengths": {"edges": [0, 256, 512, 1024, 2048, 4096, 8192], "counts": [900, 12000, 31000, 15000, 4800, 300]},
        "samples": [{"source": f"chats.jsonl:{line}", "pieces": pieces} for line in (3, 17)],
    }

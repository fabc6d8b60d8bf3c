"""Memory and time of a step on one GPU, beside what the planner predicts.

Twelve runs of the Trainer: full fine-tuning and LoRA, ZeRO 0 to 3, offload, activation checkpointing, two lengths.
Memory is the peak of ``torch.cuda.max_memory_allocated`` against the predicted tensors, and that of reserved memory
with the context against the predicted memory of the device.

    python benchmarks/gpu_memory.py --out memory.json
    python benchmarks/gpu_memory.py --device cpu            the same code on tiny shapes: does it run? No memory there.

The exit code is 1 if a run fails.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_models import CASES, Case, Tokens, build_model, collate
from gpu_throughput import Clock, arguments
from kept_results import Results

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.estimate import CONTEXT, estimate_memory
from ds_trainer.planner.planned_model import PlannedModel
from ds_trainer.planner.step_time import step_time
from ds_trainer.training.model.chunked_loss.chunked_loss import uses_tiles

Run = tuple[Case, dict[str, Any]]  # with arguments of TrainingArguments


def runs(device: str) -> Iterator[Run]:
    """The runs: a model and how it is trained."""
    small, *others = CASES[device]
    lora = others[-1]
    yield from ((small, {"zero_stage": stage}) for stage in (0, 1, 2, 3))
    yield replace(small, recompute=True), {"zero_stage": 1}
    yield replace(small, micro_batch=1, sequence=2 * small.sequence), {"zero_stage": 2}
    yield small, {"zero_stage": 2, "gradient_accumulation_steps": 2}
    yield small, {"zero_stage": 2, "offload_optimizer": "cpu"}
    yield from ((case, {"zero_stage": 1}) for case in others[:2])
    yield lora, {"zero_stage": 0}
    yield lora, {"zero_stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"}


def candidate(case: Case, given: dict[str, Any]) -> Candidate:
    """The run as the planner describes it."""
    return Candidate(
        1,
        case.sequence,
        stage=given["zero_stage"],
        micro_batch=case.micro_batch,
        accumulation=given.get("gradient_accumulation_steps", 1),
        offload_optimizer="offload_optimizer" in given,
        offload_param="offload_param" in given,
        checkpointing=case.recompute,
        chunked_loss=uses_tiles(None, case.micro_batch * case.sequence, case.vocabulary),
    )


def name_of(case: Case, given: dict[str, Any]) -> str:
    """For the table."""
    return f"{case.name}, {case.micro_batch} x {case.sequence}, {candidate(case, given).describe()}"


def predicted(case: Case, given: dict[str, Any], device: str) -> dict[str, float | None]:
    """Bytes of tensors and of the device, seconds of a step."""
    with torch.device("meta"):
        model = PlannedModel.from_module(build_model(case, "meta"))
    run = candidate(case, given)
    memory = estimate_memory(model, run)
    seconds = None
    if device == "cuda":
        seconds = step_time(model, run, Cluster.of(torch.cuda.get_device_name(), 1, 1)).seconds
    return {"tensors": memory.tensors, "device": memory.device, "seconds": seconds}


def measured(case: Case, given: dict[str, Any], device: str) -> dict[str, float | None]:
    """The same, of a run."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments

    clock = Clock(case, device)

    class StepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_done()

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    samples = replace(case, micro_batch=case.micro_batch * given.get("gradient_accumulation_steps", 1))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(**{**arguments(case, device, folder), **given})
        trainer = Trainer(build_model(case, device), args, data_collator=collate, train_dataset=Tokens(samples))
        trainer.callback_handler.add_callback(StepEnd())
        trainer.train()
        trainer.engine.close()
    found: dict[str, float | None] = {"seconds": clock.seconds, "tensors": None, "device": None}
    if device == "cuda":
        found["tensors"] = torch.cuda.max_memory_allocated()
        found["device"] = torch.cuda.max_memory_reserved() + CONTEXT
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a run, and the smallest, median and largest ratio."""
    lines = ["| run | tensors, GB | predicted | ratio | device | step, s | ratio |", "|---|---|---|---|---|---|---|"]
    ratios: dict[str, list[float]] = {"tensors": [], "device": [], "seconds": []}
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['name']} | {row['error'].splitlines()[0][:100]} | | | | | |")
            continue
        found = {}
        for key, values in ratios.items():
            real, planned = row["measured"][key], row["predicted"][key]
            found[key] = ""
            if real and planned:
                values.append(planned / real)
                found[key] = f"{values[-1]:.3f}"
        real, planned = row["measured"]["tensors"], row["predicted"]["tensors"]
        lines.append(
            f"| {row['name']} | {real / 1e9 if real else 0:.2f} | {planned / 1e9:.2f} | {found['tensors']} "
            f"| {found['device']} | {row['measured']['seconds']:.3f} | {found['seconds']} |"
        )
    for key, values in ratios.items():
        if values:
            middle = statistics.median(values)
            lines.append(f"\npredicted / measured, {key}: {min(values):.3f} / {middle:.3f} / {max(values):.3f}")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", help="names of models; all by default")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this time")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    results = Results(options.out, options.device, options.minutes)
    for case, given in runs(options.device):
        if options.models and case.name not in options.models:
            continue
        if results.out_of_time:
            break
        row: dict[str, Any] = {"name": name_of(case, given)}
        try:
            row["predicted"] = predicted(case, given, options.device)
            row["measured"] = measured(case, given, options.device)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
        gc.collect()  # an engine is full of cycles
        results.add(row)
    print("\n" + table(results.cases))
    return 1 if any("error" in row for row in results.cases) else 0


if __name__ == "__main__":
    sys.exit(main())

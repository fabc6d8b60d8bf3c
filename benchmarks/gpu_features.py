"""What each feature for speed and memory does to one model on one device, and the longest sequence that fits.

``variants``: tokens per second and peak memory of this Trainer with one argument changed: the loss in chunks or whole,
compiled blocks or not, activations recomputed, in host memory or not, MLPs tiled, fp8 where torchao and the device have
it; and ragged samples packed or padded (tokens that are no padding count). Two are no features: ``profile`` has the
names and times of a step's kernels (which attention, which products) and the idle time of the GPU, and ``DeepSpeed's
gradient norm`` shows what this package's is worth. ``longest``: the length is doubled until a
step does not fit, then the interval is halved down to 5 %. Every try is a process of its own, so one that runs out of
memory leaves nothing behind.

    python benchmarks/gpu_features.py variants --model 1b --out features.json
    python benchmarks/gpu_features.py longest --model "8b lora" --minutes 20
    python benchmarks/gpu_features.py variants --device cpu                   the same code, small: does it run?
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_models import CASES, SEED, Case, Tokens, collate
from gpu_throughput import Clock, arguments
from kept_results import Results
from torch.utils.data import Dataset

RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
DEEPSPEEDS_NORM = "DeepSpeed's gradient norm"
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "profile": {"profile_steps": 3},
    "profile, compiled blocks": {"profile_steps": 3, "torch_compile_regional": True},
    DEEPSPEEDS_NORM: {},
    "whole logits": {"loss_chunk_tokens": 0},
    "chunked loss": {"loss_chunk_tokens": 1024},
    "compiled blocks": {"torch_compile_regional": True},
    "recomputed activations": RECOMPUTED,
    "offloaded activations": {**RECOMPUTED, "activation_offload": True},
    "tiled MLPs": {"tiled_mlp": True},
    "fp8, compiled blocks": {"fp8": True, "torch_compile_regional": True},
    "ragged, padded": {},
    "ragged, packed": {"packing": True},
}
LONGEST = {"long_context": True, "activation_offload": True}
_FINEST = 0.05


class Ragged(Dataset[dict[str, torch.Tensor]]):
    """Samples whose lengths are spread like those of text: most are short, some as long as the sequence."""

    def __init__(self, case: Case) -> None:
        draw = torch.Generator().manual_seed(SEED)
        samples = (case.warmup + case.steps) * case.micro_batch * 8
        spread = torch.empty(samples).exponential_(4 / case.sequence, generator=draw)
        self.lengths = spread.long().clamp(8, case.sequence).tolist()
        self.rows = Tokens(case).rows

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index % len(self.rows)][: self.lengths[index]]
        return {"input_ids": row, "labels": row}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch, padded to its longest sample."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}

    def joined(key: str) -> torch.Tensor:
        pads = [(0, longest - len(row[key])) for row in rows]
        parts = [torch.nn.functional.pad(row[key], pad, value=fill[key]) for row, pad in zip(rows, pads, strict=True)]
        return torch.stack(parts)

    return {"input_ids": joined("input_ids"), "labels": joined("labels")}


def measure(case: Case, device: str, values: dict[str, Any], ragged: bool, own_norm: bool = True) -> dict[str, Any]:
    """Train; targets a second over the timed steps, and the peak of allocated memory."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments
    from ds_trainer.engine import training_engine

    if not own_norm:
        training_engine.reduce_norm_once = lambda optimizer: None

    clock, targets = Clock(case, device), []

    class Counting(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            targets.append(inputs["labels"].ne(-100).sum())
            clock.losses.append(super().training_step(model, inputs, num_items_in_batch).detach())
            return clock.losses[-1]

    class StepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_done()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as output_dir:
        given = {**arguments(replace(case, recompute=False), device, output_dir), "zero_stage": 1, **values}
        if device == "cpu" and "torch_compile_regional" in given:
            given["torch_compile_backend"] = "eager"
        args = TrainingArguments(**given, max_length=case.sequence)
        packs = bool(values.get("packing"))
        options: dict[str, Any] = {} if packs else {"data_collator": padded if ragged else collate}
        data = Ragged(case) if ragged else Tokens(case)
        trainer = Counting(clock.model(), args, train_dataset=data, **options)
        trainer.callback_handler.add_callback(StepEnd())
        trainer.train()
        trainer.engine.close()
        figures = Path(output_dir) / "profile" / "profile.json"
        profile = {"profile": json.loads(figures.read_text(encoding="utf-8"))} if figures.exists() else {}
    timed = sum(int(count) for count in targets[case.warmup :])
    return {
        "targets_per_second": timed / (clock.seconds * case.steps),
        "seconds_per_step": clock.seconds,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        "loss": float(clock.losses[-1]),
        **profile,
    }


def attempt(task: dict[str, Any], seconds: float) -> dict[str, Any]:
    """:func:`measure` in a process of its own; its result, or what ended it."""
    command = [sys.executable, __file__, "one", "--task", json.dumps(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return {"error": "stopped at the time limit"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
        return found
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return {
        "error": next((line for line in reversed(said) if "Error: " in line or "OutOfMemory" in line), said[-1])[:500]
    }


def longest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """The longest length for which ``fits`` is true, to 5 %, at most ``most``; 0 if ``first`` does not fit."""
    good, bad = 0, first
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    if good == 0 or bad > most:
        return good
    while bad - good > _FINEST * good:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def task_of(case: Case, device: str, values: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a process is told."""
    return {"case": vars(case), "device": device, "values": values, "ragged": False, **more}


def main() -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("variants", "longest", "one"))
    parser.add_argument("--model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--most", type=int, help="longest length that is tried")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "one":
        task = json.loads(given.task)
        found = measure(Case(**task.pop("case")), **task)
        print("RESULT " + json.dumps(found), flush=True)
        return 0
    cpu = given.device == "cpu"
    default = ("tiny" if cpu else "1b") if given.what == "variants" else "tiny lora" if cpu else "8b lora"
    case = next(one for one in CASES[given.device] if one.name == (given.model or default))
    results = Results(given.out, given.device, given.minutes, model=case.name)
    seconds = 60 * given.minutes
    if given.what == "variants":
        for name in given.variants:
            values = VARIANTS[name]
            if results.out_of_time:
                break
            if "fp8" in values and (cpu or find_spec("torchao") is None):
                continue
            more = {"ragged": name.startswith("ragged"), "own_norm": name != DEEPSPEEDS_NORM}
            found = attempt(task_of(case, given.device, values, **more), seconds)
            results.add({"variant": name, **found})
            print(name, found, flush=True)
        return int(any("error" in one for one in results.cases))

    def fits(length: int) -> bool:
        if results.out_of_time:
            return False
        long = replace(case, sequence=length, micro_batch=1, warmup=1, steps=1)
        found = attempt(task_of(long, given.device, LONGEST), seconds)
        results.add({"length": length, **found})
        print(length, found, flush=True)
        return "error" not in found

    found = longest(fits, 64 if cpu else 8192, given.most or (128 if cpu else 2**21))
    results.add({"longest": found, "out_of_time": results.out_of_time})
    print(f"longest sequence that fits: {found:,} tokens", flush=True)
    return int(found == 0)


if __name__ == "__main__":
    sys.exit(main())

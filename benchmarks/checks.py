"""What the checks of the first 20 steps and the watch of weights that ZeRO 3 has released cost in CPU time.

    python benchmarks/checks.py                 all rows, a few minutes
    python benchmarks/checks.py --json FILE     also write every number

Trainings with and without a check take turns in one process, each with an engine of its own; the first pair is not
counted. A step's time is the CPU time of the process from its beginning to that of the next one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ds_trainer
from ds_trainer.training import run_setup
from ds_trainer.training.loop.first_steps import STEPS, FirstSteps
from tests.support.models import RaggedTokens, tiny_llama

ROWS = [("first steps", 0), ("first steps", 1), ("first steps", 3), ("released weights", 3)]
SIZES = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024}


class Clock(ds_trainer.TrainerCallback):
    """When each step begins."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *args: Any, **keywords: Any) -> None:
        self.times.append(time.process_time())


def milliseconds(check: str, stage: int, with_check: bool) -> list[float]:
    """The time of each step of one training."""
    clock, first, watch = Clock(), FirstSteps.of, run_setup.watch_released
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    values: dict[str, Any] = {"deepspeed": {"zero_optimization": zero}, "save_strategy": "no", "self_test": "never"}
    values |= {"max_steps": 2 * STEPS + 1, "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4}
    if not with_check and check == "first steps":
        FirstSteps.of = lambda *args: None  # type: ignore[assignment, method-assign]
    elif not with_check:
        run_setup.watch_released = lambda model: None
    try:
        with tempfile.TemporaryDirectory() as folder:
            args = ds_trainer.TrainingArguments(folder, **values)
            model = tiny_llama(**SIZES)
            trainer = ds_trainer.Trainer(model, args, train_dataset=RaggedTokens(400), callbacks=[clock])
            trainer.train()
            trainer.engine.close()
    finally:
        FirstSteps.of, run_setup.watch_released = first, watch  # type: ignore[method-assign]
    return [1e3 * (after - before) for before, after in zip(clock.times, clock.times[1:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, lines = {}, []
    for check, stage in ROWS:
        turns = [[milliseconds(check, stage, on) for on in (False, True)] for _ in range(options.turns + 1)][1:]
        parts = {"step 1": slice(1), f"steps 2 to {STEPS}": slice(1, STEPS), "later steps": slice(STEPS, None)}
        ratios = [
            statistics.median(statistics.median(on[part]) / statistics.median(off[part]) for off, on in turns)
            for part in parts.values()
        ]
        found[f"{check}, ZeRO {stage}"] = {"turns": turns, "ratios": dict(zip(parts, ratios, strict=True))}
        lines.append(f"| {check} | {stage} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    print("\n".join(["| check | ZeRO | " + " | ".join(parts) + " |", "|---" * 5 + "|", *lines]))
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""A rank of ``restarts.py``: trains, writes a line a step into a diary, and what came of it when all is done."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.models import Regression, regression_rows
from tests.support.resuming import run_record


class ProgressLog(TrainerCallback):
    """Writes a line per step that survives the death of the process."""

    def __init__(self, path: Path) -> None:
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("begin", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("step", state.global_step)
        time.sleep(0.01)

    def note(self, event: str, step: int) -> None:
        os.write(self.file, f"{event} {self.attempt} {step} {time.time()}\n".encode())


def work(directory: Path, steps: int, interval: int, in_background: bool) -> None:
    """Train as a rank, and write down what came of it."""
    rank = os.environ["RANK"]
    model = Regression()  # and not a Llama: half of the start-up would be imports for it
    model.layers.insert(2, nn.Dropout(0.2))
    args = TrainingArguments(
        str(directory / "out"),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        save_steps=interval,
        save_total_limit=3,
        save_async=in_background,
        zero_stage=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model, args, train_dataset=regression_rows(37), callbacks=[ProgressLog(directory / f"diary-{rank}")]
    )
    trainer.train()
    record = run_record(trainer, [])
    (directory / f"story-{rank}.json").write_text(json.dumps(asdict(record)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--waiting", action="store_true", help="checkpoints while training waits")
    options = parser.parse_args()
    work(options.directory, options.steps, options.interval, not options.waiting)

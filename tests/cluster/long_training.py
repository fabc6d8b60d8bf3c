"""A training that takes as long as a test wants: python tests/cluster/long_training.py FOLDER STARTS [SAVE_STEPS]
[FAULT ...]

Its first starts run freely for some steps and then crawl, so that whatever shall end them finds them at work; start
number STARTS runs to the end. Which start made which step is written to FOLDER/trace, the weights to FOLDER/final.

With faults, start K ends with fault K on the last rank, once a checkpoint has been written: the name of a signal,
"stop" (its processes stop, as in a driver that hangs), "node" (all processes of its machine stop, slurmd too), "memory"
(the GPU has too little) or "error". Its machine is written to FOLDER/faults.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils import distributed
from ds_trainer.utils.outcomes import checkpoint_was_written
from tests.support.models import PlainLanguageModel, RaggedTokens

STEPS = 300
FREE_STEPS = 12
HANG_SECONDS = 20.0


def suffer(folder: Path, fault: str) -> None:
    """End this rank by ``fault``."""
    with (folder / "faults").open("a", encoding="utf-8") as file:
        file.write(f"{fault} {os.uname().nodename}\n")
    if fault == "error":
        raise ValueError("of the program")
    if fault == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if fault == "node":
        os.kill(-1, signal.SIGSTOP)  # whatever it may signal: what is in the process namespace of this machine
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if fault == "stop":
        os.kill(os.getppid(), signal.SIGSTOP)  # what started this rank
        os.kill(os.getpid(), signal.SIGSTOP)
        return  # SLURM has continued it to end it
    os.kill(os.getpid(), signal.Signals[fault])


def wants_fault(outcomes: str | None) -> bool:
    """Whether this is the last rank and its start has written a checkpoint."""
    last = distributed.rank() == distributed.world_size() - 1
    return last and outcomes is not None and checkpoint_was_written(Path(outcomes))


class Pace(TrainerCallback):
    """Notes every step, and crawls in starts that are not the last one."""

    def __init__(self, folder: Path, start: int, last: bool, fault: str | None) -> None:
        self._folder, self._start, self._last, self._fault = folder, start, last, fault
        self._done = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._done += 1
        if state.is_world_process_zero:
            with (self._folder / "trace").open("a", encoding="utf-8") as file:
                file.write(f"{self._start} {state.global_step}\n")
        if self._fault is not None and wants_fault(os.environ.get("DS_TRAINER_OUTCOME_DIR")):
            suffer(self._folder, self._fault)
        if not self._last and self._done > FREE_STEPS and state.global_step < STEPS - 10:
            time.sleep(0.5)


def main(folder: Path, starts: int, save_steps: int, faults: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True)
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    fault = faults[start - 1] if start <= len(faults) else None
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="steps",
        save_steps=save_steps or 500,
        time_limit_margin=0.0,
        hang_timeout=HANG_SECONDS if faults else 300.0,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    model = PlainLanguageModel(dropout=0.1)
    trainer = Trainer(
        model, args, train_dataset=RaggedTokens(64), callbacks=[Pace(folder, start, start >= starts, fault)]
    )
    trainer.train()
    trainer.save_model(str(folder / "final"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0, sys.argv[4:])

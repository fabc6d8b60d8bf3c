"""A training that takes as long as a test wants: python tests/cluster/long_training.py FOLDER STARTS [SAVE_STEPS]

Its first starts run freely for some steps and then crawl, so that whatever shall end them finds them at work; start
number STARTS runs to the end. Which start made which step is written to FOLDER/trace, the weights to FOLDER/final.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.models import PlainLanguageModel, RaggedTokens

STEPS = 300
FREE_STEPS = 12


class Pace(TrainerCallback):
    """Notes every step, and crawls in starts that are not the last one."""

    def __init__(self, folder: Path, start: int, last: bool) -> None:
        self._folder, self._start, self._last = folder, start, last
        self._done = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._done += 1
        if state.is_world_process_zero:
            with (self._folder / "trace").open("a", encoding="utf-8") as file:
                file.write(f"{self._start} {state.global_step}\n")
        if not self._last and self._done > FREE_STEPS and state.global_step < STEPS - 10:
            time.sleep(0.5)


def main(folder: Path, starts: int, save_steps: int) -> None:
    folder.mkdir(exist_ok=True)
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="steps",
        save_steps=save_steps or 500,
        time_limit_margin=0.0,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    model = PlainLanguageModel(dropout=0.1)
    trainer = Trainer(model, args, train_dataset=RaggedTokens(64), callbacks=[Pace(folder, start, start >= starts)])
    trainer.train()
    trainer.save_model(str(folder / "final"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)

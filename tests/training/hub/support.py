"""Small runs that push."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.hub_server import TOKEN
from tests.support.models import Regression, regression_rows

NAME = "tester/run"


def make_trainer(folder: Path, model: Any = None, callbacks: Any = None, data: Any = None, **values: Any) -> Trainer:
    """A trainer of four steps, saving at every second one, that pushes to ``tester/run``."""
    defaults: dict[str, Any] = dict(
        max_steps=4,
        save_steps=2,
        save_strategy="steps",
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        push_to_hub=True,
        hub_token=TOKEN,
        save_async=False,  # tests look at the moments of pushes; a save in the background is pushed when it is there
    )
    args = TrainingArguments(**{"output_dir": str(folder / "run"), **defaults, **values})
    rows = regression_rows(16) if data is None else data
    return Trainer(Regression() if model is None else model, args, train_dataset=rows, callbacks=callbacks)


def run(folder: Path, **values: Any) -> Trainer:
    """Train, and give back the engine's memory."""
    trainer = make_trainer(folder, **values)
    trainer.train()
    trainer.engine.close()
    return trainer


class AtStep(TrainerCallback):
    """Calls functions after steps, by their numbers."""

    def __init__(self, **functions: Any) -> None:
        self.functions = {int(name.removeprefix("step")): function for name, function in functions.items()}
        self.reached: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reached.append(state.global_step)
        self.functions.get(state.global_step, lambda: None)()


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    """Until ``condition()`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)

"""Stop requests for tests: a callback that acts at a step, and signals to this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ds_trainer import TrainerCallback


class ActAtStep(TrainerCallback):
    """Runs an action on one rank at the end of a step, and records events."""

    def __init__(self, step: int, action: Callable[[], None], rank: int = 1) -> None:
        self.step, self.action, self.rank = step, action, rank
        self.events: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == min(self.rank, args.world_size - 1):
            self.action()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"evaluate {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"save {state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("end")


def send(*numbers: int) -> None:
    """Signals to this process, too far apart to be one request."""
    for index, number in enumerate(numbers):
        time.sleep(2.5 if index else 0.0)
        os.kill(os.getpid(), number)
    time.sleep(0.5)  # a thread counts them

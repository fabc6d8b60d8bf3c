"""Runs in which one rank stands still, until the watchdog has said so."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils import distributed
from tests.support.models import RaggedTokens, tiny_llama

LIMIT = 2.0
LONGEST = 40.0  # seconds that a rank stands still where no report comes
STEP = 3  # after which it does


def until_reported(output_dir: str) -> bool:
    """Wait for a report of a hang; whether one came."""
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        if list(Path(output_dir).glob("health/hang-*/report.txt")):
            time.sleep(0.5)  # it is being told
            return True
        time.sleep(0.05)
    return False


class Stops(Trainer):
    """In the loss after step 3, one rank does ``stands_still``."""

    faulty = -1
    stands_still: Callable[[], Any] = staticmethod(lambda: None)

    def compute_loss(self, *args: Any, **keywords: Any) -> Any:
        if self.state.global_step == STEP and distributed.rank() == self.faulty:
            self.stands_still()
        return super().compute_loss(*args, **keywords)


class StopsInLoader(RaggedTokens):
    """One rank waits for its data after step 3."""

    def __init__(self, stands_still: Callable[[], Any]) -> None:
        super().__init__(96)
        self.stands_still = stands_still
        self.done = False

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 8 * STEP and not self.done:
            self.done = True
            self.stands_still()
        return super().__getitem__(index)


class Gathers(TrainerCallback):
    """After step 3, rank 0 alone gathers the weights."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        import deepspeed

        if state.global_step == STEP and state.is_world_process_zero:
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                pass


def gathers_alone(output_dir: str) -> None:
    large = {"deepspeed": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}
    args = arguments(output_dir, zero_stage=3, hang_policy="abort", **large)
    Trainer(tiny_llama(), args, train_dataset=RaggedTokens(96), callbacks=[Gathers()]).train()


class WatchesPhases(TrainerCallback):
    """Sleeps where that is no hang: at the start and in an evaluation."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_begin(self, *args: Any, **keywords: Any) -> None:
        time.sleep(self.seconds)

    def on_evaluate(self, *args: Any, **keywords: Any) -> None:
        time.sleep(self.seconds)


def arguments(output_dir: str, **more: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        per_device_train_batch_size=4,
        max_steps=6,
        zero_stage=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
        hang_timeout=LIMIT,
        hang_factor=5,
    )
    return TrainingArguments(output_dir, **{**values, **more})


def stops_in_step(output_dir: str, faulty: int, how: str, **more: Any) -> int:
    """Train with a rank that stands still in a step; the steps done."""
    own = StopsInStep(output_dir, faulty)
    kind = type("Stopping", (Stops,), {"faulty": faulty, "stands_still": staticmethod(getattr(own, how))})
    trainer = kind(tiny_llama(), arguments(output_dir, **more), train_dataset=RaggedTokens(96))
    with own:
        trainer.train()
    trainer.engine.close()
    return int(trainer.state.global_step)


class StopsInStep:
    """The ways in which a rank can stand still, and what ends that: another one, when it sees the report."""

    def __init__(self, output_dir: str, faulty: int) -> None:
        self.output_dir, self.faulty = output_dir, faulty
        self.note = Path(output_dir) / "faulty_process"

    def __enter__(self) -> None:
        if distributed.rank() != self.faulty:
            threading.Thread(target=self._wake, daemon=True).start()

    def __exit__(self, *args: Any) -> None:
        pass

    def sleep(self) -> None:
        until_reported(self.output_dir)

    def stop_process(self) -> None:
        time.sleep(LIMIT / 2)  # else it had no time yet to say where it is
        self.note.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        # The alarm that passed meanwhile prints all stacks now. In Python 3.11 that can crash on a thread that runs.
        time.sleep(LIMIT / 4)

    def hold_the_lock(self) -> None:
        time.sleep(LIMIT / 4)  # the alarm of a run whose steps are over in no time is not set yet
        ctypes.PyDLL(None).usleep(int(1e6 * 4 * LIMIT))  # not CDLL, which would let other threads run

    def for_ever(self) -> None:
        time.sleep(LONGEST)

    def _wake(self) -> None:
        if until_reported(self.output_dir) and self.note.exists():
            os.kill(int(self.note.read_text()), signal.SIGCONT)


def stops_in_loader(output_dir: str, faulty: int) -> int:
    """Train with a rank whose data does not come; the steps done."""
    slow = distributed.rank() == faulty
    data = StopsInLoader(lambda: until_reported(output_dir) if slow else None)
    trainer = Trainer(tiny_llama(), arguments(output_dir), train_dataset=data)
    trainer.train()
    trainer.engine.close()
    return int(trainer.state.global_step)


def slow_but_alive(output_dir: str, seconds: float) -> int:
    """Long asides, and steps that take nearly as long as is allowed; the steps done."""
    pause = Pauses(seconds)
    values: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 3}
    trainer = Trainer(
        tiny_llama(),
        arguments(output_dir, **values),
        train_dataset=RaggedTokens(96),
        eval_dataset=RaggedTokens(16),
        callbacks=[WatchesPhases(1.1 * seconds), pause],
    )
    trainer.train()
    trainer.engine.close()
    return int(trainer.state.global_step)


class Pauses(TrainerCallback):
    """Every step takes most of the limit; the first one more than it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        time.sleep(self.seconds * (1.1 if state.global_step == 0 else 0.4))


def reports(output_dir: Path) -> Iterator[str]:
    """What all reports say."""
    for path in sorted(output_dir.glob("health/hang-*/report.txt")):
        yield path.read_text(encoding="utf-8")

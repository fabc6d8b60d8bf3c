"""Every way in which one rank of two ends, as a table, and the program that the ranks run."""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils.exit_codes import DONE, FAILED, FAULT, HUNG, REQUEUE
from tests.support.models import PlainLanguageModel, RaggedTokens

FAILING = 1


class Breaks(Exception):
    """What the failing rank raises."""


class Unprintable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


def fail(error: BaseException) -> None:
    raise error


def kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def use_all_memory() -> None:
    kept = []
    while True:
        kept.append(b"x" * 2**25)


def fill_the_disk() -> None:
    """No file of this process may become longer, as on a full disk or above a quota."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def no_more_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    use_all_memory()


def fail_in_the_model(model: Any) -> None:
    list(model.modules())[-1].register_full_backward_hook(lambda *_: fail(Breaks("broken")))


class FailingTokens(RaggedTokens):
    """Its process of the data loader ends at some sample, on one rank."""

    def __getitem__(self, index: int) -> Any:
        if os.environ["RANK"] == str(FAILING):
            ENDS[os.environ["TEST_END"]].act()
        return super().__getitem__(index)


@dataclass(frozen=True)
class End:
    """One way to end: what the rank does, the exit code of the job under ``ds-trainer launch``, a part of its output.

    ``when`` is ``step`` (after step 2), ``model`` (in the pass after it), ``data``, ``start`` (before the Trainer is
    made) or ``exit`` (after the training); ``arguments`` are of the Trainer.
    """

    act: Callable[..., Any]
    code: int
    said: str
    when: str = "step"
    arguments: dict[str, Any] = field(default_factory=dict)


def failed(what: str) -> str:
    return f"rank {FAILING} failed with {what}"


def killed_by(name: str) -> str:
    return f"rank {FAILING} on {{host}} was killed by {name}."


def ended_with(code: int) -> str:
    return f"rank {FAILING} on {{host}} ended with exit code {code}."


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
WATCHED = {"hang_timeout": 5.0, "hang_policy": "abort", "hang_factor": 1.0}
SAVED = {"save_steps": 1, "save_failure_policy": "stop"}
LOADED = {"dataloader_num_workers": 1}
SIGNALS = ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGHUP", "SIGALRM", "SIGXCPU", "SIGUSR2"]
ENDS: dict[str, End] = {
    "error": End(lambda: fail(Breaks("broken")), FAILED, failed("Breaks: broken")),
    "error in the backward pass": End(fail_in_the_model, FAILED, failed("Breaks: broken"), "model"),
    "error without a text": End(lambda: fail(Unprintable()), FAILED, failed("Unprintable")),
    "error of 2 MB": End(lambda: fail(Breaks("\x1b[31m\udc80\n" * 500_000)), FAILED, failed("Breaks")),
    "MemoryError": End(lambda: fail(MemoryError()), FAILED, failed("OutOfMemory: Out of memory on rank 1")),
    "address space": End(no_more_memory, FAILED, failed("OutOfMemory: Out of memory on rank 1")),
    "KeyboardInterrupt": End(lambda: fail(KeyboardInterrupt()), 130, killed_by("SIGINT")),
    "BaseException": End(lambda: fail(GeneratorExit("broken")), FAILED, ended_with(1)),
    "sys.exit": End(lambda: sys.exit(3), 3, failed("SystemExit: 3")),
    "sys.exit(0)": End(lambda: sys.exit(0), FAILED, failed("SystemExit: 0")),
    "sys.exit with a text": End(lambda: sys.exit("no more"), FAILED, failed("SystemExit: no more")),
    "sys.exit(512)": End(lambda: sys.exit(512), FAILED, failed("SystemExit: 512")),
    "os._exit": End(lambda: os._exit(3), 3, ended_with(3)),
    "os._exit(0)": End(lambda: os._exit(0), FAULT, f"rank {FAILING} on {{host}} is gone without an error"),
    "another program": End(lambda: os.execv("/bin/false", ["false"]), 1, ended_with(1)),
    "no other program": End(lambda: os.execv("/no/such", ["x"]), FAILED, failed("FileNotFoundError")),
    "abort": End(os.abort, 134, killed_by("SIGABRT")),
    **{name: End(kill(signal.Signals[name]), 128 + signal.Signals[name], killed_by(name)) for name in SIGNALS},
    "SIGTERM": End(kill(signal.SIGTERM), REQUEUE, f"by SIGTERM on rank {FAILING}: "),
    "memory of the GPU": End(lambda: fail(CUDA), FAILED, failed("OutOfMemory: Out of memory on rank 1")),
    "memory of the job": End(use_all_memory, 137, "because memory was exhausted: the limit of its cgroup is 3.00 GB"),
    "closed connections": End(lambda: os.closerange(3, 4096), 134, killed_by("SIGABRT")),
    "left its group": End(dist.destroy_process_group, FAILED, f"rank {FAILING}"),
    "full disk": End(fill_the_disk, FAILED, f"rank {FAILING}", "step", SAVED),
    "hang": End(lambda: time.sleep(600), HUNG, f"Slow: rank {FAILING} (", "step", WATCHED),
    "hang in C": End(lambda: ctypes.PyDLL(None).sleep(600), HUNG, f"Slow: rank {FAILING} (", "step", WATCHED),
    "SIGSTOP": End(kill(signal.SIGSTOP), HUNG, f"Slow: rank {FAILING} (", "step", WATCHED),
    "error of the data": End(lambda: fail(Breaks("broken")), FAILED, failed("Breaks"), "data"),
    "error of a data loader": End(lambda: fail(Breaks("broken")), FAILED, failed("Breaks"), "data", LOADED),
    "data loader killed": End(kill(9), FAULT, failed("RuntimeError: DataLoader worker"), "data", LOADED),
    "no module": End(lambda: __import__("no_such_module"), FAILED, ended_with(1), "start"),
    "killed at the start": End(kill(9), 137, killed_by("SIGKILL"), "start"),
    "error in a thread": End(
        threading.Thread(target=fail, args=(Breaks("in a thread"),)).start,
        DONE,
        "Breaks: in a thread",
        "step",
        {"max_steps": 4},
    ),
    "error after the training": End(lambda: fail(Breaks("late")), FAILED, ended_with(1), "exit", {"max_steps": 4}),
    "os._exit at the exit": End(lambda: atexit.register(os._exit, 5), 5, ended_with(5), "exit", {"max_steps": 4}),
}


class EndsAt(TrainerCallback):
    """After step 2, on one rank."""

    def __init__(self, end: End) -> None:
        self.end = end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == FAILING and state.global_step == 2:
            self.end.act(*(() if self.end.when == "step" else (kwargs["model"],)))


def main(output_dir: str) -> None:
    end = ENDS[os.environ["TEST_END"]]
    fails = (os.environ.get("RANK") or os.environ["SLURM_PROCID"]) == str(FAILING)
    if fails and end.when == "start":
        end.act()
    given = dict(max_steps=4000, save_steps=100_000, zero_stage=1, per_device_train_batch_size=4, disable_tqdm=True)
    given.update(use_cpu=True, self_test="never", report_to="none", run_report=False)
    args = TrainingArguments(output_dir, **{**given, **end.arguments})
    tokens = (FailingTokens if end.when == "data" else RaggedTokens)(64)
    Trainer(
        PlainLanguageModel(),
        args,
        train_dataset=tokens,
        callbacks=[EndsAt(end)] if end.when in ("step", "model") else [],
    ).train()
    if fails and end.when == "exit":
        end.act()

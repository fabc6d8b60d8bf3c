"""How ``ds-trainer launch`` and its ranks communicate: environment variables, and files in a shared directory."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from ds_trainer.utils import outcomes

JOB_ID = "DS_TRAINER_JOB_ID"
ATTEMPT_DIR = "DS_TRAINER_ATTEMPT_DIR"
LAUNCHED_BY = "DS_TRAINER_LAUNCHED_BY"
CONNECTION = "DS_TRAINER_ENDS_WITH_CONNECTION"
STOP_FILE = "DS_TRAINER_STOP_FILE"
AUTO_RESUME = "DS_TRAINER_AUTO_RESUME"
ABORT_NAME = "abort"
SHARED_NAME = ".ds_trainer_launch"


@dataclass(frozen=True)
class LaunchedJob:
    """One job: its id, its directory, and the stop file, whose existence asks the ranks to stop."""

    directory: Path
    stop_file: Path
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def attempt(self, number: int) -> Attempt:
        """Create attempt ``number`` and its directory."""
        attempt = Attempt(self, number)
        attempt.outcome_dir.mkdir(parents=True)
        return attempt

    def remove(self) -> None:
        """Remove the directory, and its parent if :mod:`ds_trainer.launching` created it and it is empty."""
        shutil.rmtree(self.directory)
        if self.directory.parent.name == SHARED_NAME and not any(self.directory.parent.iterdir()):
            self.directory.parent.rmdir()


@dataclass(frozen=True)
class Attempt:
    """One start of a job's ranks."""

    job: LaunchedJob
    number: int

    @property
    def directory(self) -> Path:
        """Files of this attempt."""
        return self.job.directory / f"attempt-{self.number}"

    @property
    def outcome_dir(self) -> Path:
        """Where the ranks record their outcomes."""
        return self.directory / "outcomes"

    def abort(self) -> None:
        """Create the abort file: ranks on all machines end when they see it."""
        with outcomes.recording("the end of the job"):
            (self.directory / ABORT_NAME).touch()

    def environment(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {
            JOB_ID: self.job.id,
            ATTEMPT_DIR: str(self.directory),
            LAUNCHED_BY: process_identity(),
            STOP_FILE: str(self.job.stop_file),
            outcomes.VARIABLE: str(self.outcome_dir),
            **({AUTO_RESUME: "1"} if self.number > 0 else {}),
        }


def process_identity() -> str:
    """A unique name of this process on all machines: host name, boot id, PID namespace, process id, start time."""
    return f"{_machine()}/{os.getpid()}/{_start_time(os.getpid())}"


def is_alive(identity: str) -> bool:
    """Whether the process of a :func:`process_identity` is alive; True if unknown (empty, or on another machine)."""
    if not identity:
        return True
    machine, number, start = identity.rsplit("/", 2)
    return machine != _machine() or _start_time(int(number)) == start


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:  # not Linux
        boot = namespace = ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def _start_time(process: int) -> str:
    """Start time of ``process`` in ticks since boot; empty if it does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]

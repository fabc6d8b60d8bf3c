"""What ``ds-trainer launch`` and its ranks tell each other: environment variables, and files in a shared directory."""

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
class Job:
    """One job: its identity, its directory, which :meth:`remove` removes, and the file that asks its ranks to stop."""

    directory: Path
    stop_file: Path
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def attempt(self, number: int) -> Attempt:
        """Attempt ``number`` to run it; makes its directory."""
        attempt = Attempt(self, number)
        attempt.outcome_dir.mkdir(parents=True)
        return attempt

    def remove(self) -> None:
        """Remove the directory, and the folder around it if it is ours and empty."""
        shutil.rmtree(self.directory)
        if self.directory.parent.name == SHARED_NAME and not any(self.directory.parent.iterdir()):
            self.directory.parent.rmdir()


@dataclass(frozen=True)
class Attempt:
    """One start of a job's ranks."""

    job: Job
    number: int

    @property
    def directory(self) -> Path:
        """What belongs to this attempt."""
        return self.job.directory / f"attempt-{self.number}"

    @property
    def outcome_dir(self) -> Path:
        """Where the ranks write how they ended."""
        return self.directory / "outcomes"

    def abort(self) -> None:
        """Make the file at which ranks end, wherever they are."""
        (self.directory / ABORT_NAME).touch()

    def environment(self) -> dict[str, str]:
        """Variables for the ranks."""
        return {
            JOB_ID: self.job.id,
            ATTEMPT_DIR: str(self.directory),
            LAUNCHED_BY: identity(),
            STOP_FILE: str(self.job.stop_file),
            outcomes.VARIABLE: str(self.outcome_dir),
            **({AUTO_RESUME: "1"} if self.number > 0 else {}),
        }


def identity() -> str:
    """This process among all on all machines: host name, boot and namespace, process id, its start."""
    return f"{_place()}/{os.getpid()}/{_start(os.getpid())}"


def is_alive(said: str) -> bool:
    """Whether the process of an :func:`identity` lives; True where that cannot be told: none, or elsewhere."""
    if not said:
        return True
    place, number, start = said.rsplit("/", 2)
    return place != _place() or _start(int(number)) == start


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:  # not Linux
        boot = namespace = ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def _start(process: int) -> str:
    """When ``process`` began, in ticks since boot; empty if it is not there (or a zombie)."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]

"""The time at which the scheduler will end this job.

``DS_TRAINER_JOB_END`` (seconds since 1970) sets it for any scheduler. In a SLURM job it is ``SLURM_JOB_END_TIME`` if
that is set (since SLURM 23). A thread also runs ``squeue`` from time to time, because limits can change during a job.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import shortened
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.threads import new_thread
from ds_trainer.utils.units import whole_number

logger = get_logger(__name__)

VARIABLE = "DS_TRAINER_JOB_END"
POLL_SECONDS = 300.0
_SQUEUE_TIMEOUT_SECONDS = 30.0


class JobEnd:
    """The end of the job, as far as it is known now.

    Args:
        environment: environment variables; default: those of the process.

    Attributes:
        at: seconds since 1970; None if there is no limit, or if it is unknown.

    Raises:
        ConfigError: ``DS_TRAINER_JOB_END`` is not a number.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self.at: float | None = None
        self._job = ""
        if text := variables.get(VARIABLE):
            if not re.fullmatch(r"[0-9]{1,18}(\.[0-9]*)?", text):
                raise ConfigError(
                    f"The environment variable {VARIABLE}={shortened(text)!r} must be the end of the job in seconds "
                    "since 1970, as `date +%s` prints them; unset it if there is no limit."
                )
            self.at = float(text)
        elif job := variables.get("SLURM_JOB_ID"):
            self.at = whole_number(variables.get("SLURM_JOB_END_TIME", ""))
            if shutil.which("squeue"):
                self._job = job
        self._closed = threading.Event()
        if self._job:
            new_thread(self._poll, name="ds_trainer-job-end").start()

    def close(self) -> None:
        """Stop asking the scheduler."""
        self._closed.set()

    def _poll(self) -> None:
        while True:
            command = ["squeue", "--noheader", "--jobs", self._job, "--format", "%e"]
            try:
                answer = subprocess.run(
                    command, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_SECONDS, check=True
                )
                self.at = read_time(answer.stdout)
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                logger.warning("The time limit of SLURM job %s is unknown: %s.", self._job, error)
            if self._closed.wait(POLL_SECONDS):
                return


def read_time(text: str) -> float | None:
    """Parse a time as SLURM prints it: seconds since 1970, or None for no limit.

    Raises:
        ValueError: it is neither.
    """
    fields = text.split()
    if not fields or fields[0] in ("N/A", "NONE", "Unknown", "UNLIMITED"):
        return None
    return time.mktime(time.strptime(fields[0], "%Y-%m-%dT%H:%M:%S"))

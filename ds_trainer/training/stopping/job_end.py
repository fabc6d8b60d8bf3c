"""When the scheduler will end this job: asked now and then in a thread, since limits are changed and answers take time.

``DS_TRAINER_JOB_END`` (seconds since 1970) says it for any scheduler. In a SLURM job ``SLURM_JOB_END_TIME`` does where
it is set (since SLURM 23), and ``squeue`` is asked, whose answer also knows of later changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.threads import new_thread

logger = get_logger(__name__)

VARIABLE = "DS_TRAINER_JOB_END"
ASK_EVERY_SECONDS = 300.0
_PATIENCE_SECONDS = 30.0


class JobEnd:
    """The end of the job as it is known now.

    Args:
        environment: where it is looked for; default: that of the process.

    Attributes:
        at: seconds since 1970; None where there is no limit, or none is known.

    Raises:
        ConfigError: ``DS_TRAINER_JOB_END`` is no number.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self.at: float | None = None
        self._job = ""
        if text := variables.get(VARIABLE):
            try:
                self.at = float(text)
            except ValueError:
                raise ConfigError(
                    f"The environment variable {VARIABLE}={text!r} must be the end of the job in seconds since 1970, "
                    "as `date +%s` prints them; unset it where there is no limit."
                ) from None
        elif job := variables.get("SLURM_JOB_ID"):
            if variables.get("SLURM_JOB_END_TIME", "").isdigit():
                self.at = float(variables["SLURM_JOB_END_TIME"])
            if shutil.which("squeue"):
                self._job = job
        self._over = threading.Event()
        if self._job:
            new_thread(self._ask_on, name="ds_trainer-job-end").start()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def _ask_on(self) -> None:
        while True:
            self._ask()
            if self._over.wait(ASK_EVERY_SECONDS):
                return

    def _ask(self) -> None:
        command = ["squeue", "--noheader", "--jobs", self._job, "--format", "%e"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=True)
            self.at = read_time(answer.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            logger.warning("The time limit of SLURM job %s is not known: %s.", self._job, error)


def read_time(text: str) -> float | None:
    """Seconds since 1970 of a time as SLURM prints it; None for no limit.

    Raises:
        ValueError: it is neither.
    """
    words = text.split()
    if not words or words[0] in ("N/A", "NONE", "Unknown", "UNLIMITED"):
        return None
    return time.mktime(time.strptime(words[0], "%Y-%m-%dT%H:%M:%S"))

"""Records how each rank ended, for the process that launched it, since launchers lose exit codes.

``deepspeed`` may return 0 if a signal killed its child, ``torchrun`` returns 1 for every failure, ``pdsh`` the largest
code. So each rank writes a small file when it ends; a rank without one did not end normally.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_trainer.utils.exit_codes import signal_name
from ds_trainer.utils.files import read_json, write_json
from ds_trainer.utils.printable import shown
from ds_trainer.utils.ranks import likely_rank

VARIABLE = "DS_TRAINER_OUTCOME_DIR"
_BLAME, _SAVED = "blame.json", "checkpoint-written"


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        code: its exit code, or 128 + N if signal N killed it.
        time: seconds since 1970.
        reason: why, if its launcher knows more than the code says.
    """

    rank: int
    code: int
    host: str
    time: float
    reason: str = ""

    def __str__(self) -> str:
        name = signal_name(self.code)
        how = f"was killed by {name}" if name else f"ended with exit code {self.code}"
        return f"rank {self.rank} on {self.host} {how}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Blame:
    """The rank that others have found to be the cause: their reports say why, as it can no longer report itself."""

    rank: int
    host: str
    error: str


@contextmanager
def recording(what: str) -> Iterator[None]:
    """For a block that tells other processes something by a file: if it cannot be written, standard error says so.

    A full disk must not replace the exit code of a rank, end a training, or leave processes behind.
    """
    try:
        yield
    except OSError as error:
        print(f"ds_trainer: {what} could not be recorded: {error}.", file=sys.stderr, flush=True)


def host_name() -> str:
    """The name of this machine, as SLURM has it if it started this process."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def record_outcome(code: int, environment: Mapping[str, str] = os.environ, reason: str = "") -> bool:
    """Record in the directory ``DS_TRAINER_OUTCOME_DIR``, if set, that this rank ends with ``code``.

    Returns:
        False if that directory does not exist on this machine.
    """
    directory = environment.get(VARIABLE)
    if not directory:
        return True
    if not os.path.isdir(directory):
        return False
    outcome = RankOutcome(likely_rank(environment), code, host_name(), time.time(), reason)
    with recording(f"that {outcome}"):
        write_json(_path(Path(directory), outcome.rank), asdict(outcome))
    return True


def record_error(error: BaseException, environment: Mapping[str, str] = os.environ) -> None:
    """Record the error that ends this rank, for a launcher that reports it after the output of all ranks.

    ``ds-trainer launch`` reads it from ``DS_TRAINER_OUTCOME_DIR``, ``torchrun`` from ``TORCHELASTIC_ERROR_FILE``.
    Without them nothing is written.
    """
    directory = environment.get(VARIABLE)
    if directory and os.path.isdir(directory):
        text = shown("".join(traceback.format_exception_only(type(error), error)).strip())
        with recording("the error of this rank"):
            write_json(_error_path(Path(directory), likely_rank(environment)), text)
    if file := environment.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with recording("the error of this rank"):
            try:
                get_error_handler().record_exception(error)
            except OSError:  # torchrun ends with a traceback of its own at a part of it
                Path(file).unlink(missing_ok=True)
                raise


def read_error(directory: Path, rank: int) -> str:
    """The error that :func:`record_error` recorded for ``rank``; empty if there is none."""
    path = _error_path(directory, rank)
    return str(read_json(path)) if path.exists() else ""


def record_blame(blame: Blame) -> None:
    """Record which rank the others wait for, or have lost. Without ``DS_TRAINER_OUTCOME_DIR`` nothing is written."""
    directory = os.environ.get(VARIABLE)
    if directory and os.path.isdir(directory):
        with recording("the rank that the others wait for"):
            write_json(Path(directory, _BLAME), asdict(blame))


def read_blame(directory: Path) -> Blame | None:
    """What :func:`record_blame` recorded last."""
    path = directory / _BLAME
    return Blame(**read_json(path)) if path.exists() else None


def record_checkpoint() -> None:
    """Record that this start has written a checkpoint, so another one would not repeat all of it."""
    directory = os.environ.get(VARIABLE)
    if directory and os.path.isdir(directory):
        with recording("that a checkpoint was written"):
            Path(directory, _SAVED).touch()


def checkpoint_was_written(directory: Path) -> bool:
    """Whether :func:`record_checkpoint` was called in this start."""
    return (directory / _SAVED).exists()


def read_outcomes(directory: Path, known: Mapping[int, RankOutcome] = {}) -> dict[int, RankOutcome]:
    """The outcomes in ``directory``, by rank.

    Args:
        directory: where the ranks record them.
        known: what an earlier call returned; only the files of other ranks are opened.
    """
    names = {_path(directory, rank).name for rank in known}
    new = [RankOutcome(**read_json(directory / name)) for name in _outcome_names(directory) if name not in names]
    return {one.rank: one for one in sorted([*known.values(), *new], key=lambda outcome: outcome.rank)}


def count_outcomes(directory: Path) -> int:
    """How many ranks have recorded an outcome in ``directory``: one listing, no file is opened."""
    return len(_outcome_names(directory))


def _outcome_names(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.startswith("rank-") and name.endswith(".json")]
    except FileNotFoundError:
        return []


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def _error_path(directory: Path, rank: int) -> Path:
    return directory / f"error-{rank}.json"

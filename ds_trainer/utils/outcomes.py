"""How each rank ended, written where whoever started it looks: launchers lose exit codes on their way.

``deepspeed`` may give 0 where a signal killed its child, ``torchrun`` gives 1 for every failure, ``pdsh`` the largest
of all. So a rank writes a small file at its end; a rank without one did not come to its end.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_trainer.utils.files import read_json, write_json
from ds_trainer.utils.ranks import likely_rank

VARIABLE = "DS_TRAINER_OUTCOME_DIR"


@dataclass(frozen=True)
class Outcome:
    """End of one rank. ``code``: its exit code, 128 + N where signal N killed it. ``time``: seconds since 1970."""

    rank: int
    code: int
    host: str
    time: float

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.code - 128 in set(signal.Signals):
            how = f"was killed by {signal.Signals(self.code - 128).name}"
        return f"rank {self.rank} on {self.host} {how}"


def record_outcome(code: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Write down that this rank ends with ``code``, if ``DS_TRAINER_OUTCOME_DIR`` names a directory.

    Returns:
        False where that directory does not exist on this machine.
    """
    directory = environment.get(VARIABLE)
    if not directory:
        return True
    if not os.path.isdir(directory):
        return False
    outcome = Outcome(likely_rank(environment), code, socket.gethostname(), time.time())
    write_json(_path(Path(directory), outcome.rank), asdict(outcome))
    return True


def read_outcomes(directory: Path) -> dict[int, Outcome]:
    """The outcomes in ``directory``, by rank."""
    found = [Outcome(**read_json(path)) for path in directory.glob("rank-*.json")]
    return {outcome.rank: outcome for outcome in sorted(found, key=lambda outcome: outcome.rank)}


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"

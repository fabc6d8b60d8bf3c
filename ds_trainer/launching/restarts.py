"""Whether a job starts again after its ranks have ended: the same rules for every launcher.

The exit codes and what follows each are in :data:`ds_trainer.utils.exit_codes.TABLE`. A fault restarts the job if it
wrote a checkpoint since its last start, or if its previous start did not end with a fault too. So an error that comes
back at the same step ends the job after two faults. The machine of the rank that failed first, or of the one that a
hung job waited for, is named and counted; a machine with two faults is to be excluded.

``python -m ds_trainer.launching.restarts STATE START LAUNCHER_CODE`` decides for batch scripts. STATE is the
folder of the job, with the outcomes of each of its starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_trainer.utils import exit_codes, outcomes
from ds_trainer.utils.exit_codes import DONE, FAILED, FAULT, HUNG, INTERRUPTED, TERMINATED, Restart, row_of, signal_name
from ds_trainer.utils.files import read_json, write_json
from ds_trainer.utils.outcomes import RankOutcome

EXCLUDED_AFTER = 2
HISTORY = "starts.json"


@dataclass(frozen=True)
class AttemptEnd:
    """How one start of a job ended.

    Attributes:
        code: exit code of the job.
        rank: the rank that caused it, if known.
        host: its machine; empty if unknown.
        saved: whether a checkpoint was written since the start.
        error: the error of that rank, if it recorded one, or what else is known of its end.
    """

    code: int
    rank: int | None = None
    host: str = ""
    saved: bool = False
    error: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether another start may cure it."""
        return row_of(self.code).restart is Restart.AFTER_FAULT


@dataclass(frozen=True)
class Decision:
    """What follows the end of a start.

    Attributes:
        restart: whether the job starts again.
        why: the reason, as sentences for the log.
        exclude: machines that the next start should do without.
    """

    restart: bool
    why: tuple[str, ...]
    exclude: tuple[str, ...] = ()


def job_code(launcher_code: int, outcomes: Mapping[int, RankOutcome], expected: int) -> tuple[int, RankOutcome | None]:
    """The exit code of a job, and the outcome that it has it from.

    Args:
        launcher_code: how the launcher ended (negative: killed by that signal).
        outcomes: by rank. The job succeeded only if every rank did.
        expected: number of ranks.
    """
    failed = [one for one in outcomes.values() if one.code != DONE]
    if failed:  # those that a launcher ended for another rank come last
        cause = min(failed, key=lambda one: (exit_codes.precedence(one.code), one.code == TERMINATED, one.time))
        return cause.code, cause
    code = launcher_code if launcher_code >= 0 else 128 - launcher_code
    return (FAILED if code == DONE and len(outcomes) < expected else code), None


def job_end(directory: Path, launcher_code: int, found: Mapping[int, RankOutcome], expected: int) -> AttemptEnd:
    """How a start of a job ended; ``directory`` has what its ranks recorded. The rest: see :func:`job_code`."""
    code, cause = job_code(launcher_code, found, expected)
    saved = outcomes.checkpoint_was_written(directory)
    blamed = outcomes.read_blame(directory) if code in (HUNG, FAULT) else None
    if blamed is not None:  # the others only waited for that rank
        return AttemptEnd(code, blamed.rank, blamed.host, saved, blamed.error)
    if cause is None or code == TERMINATED:  # by somebody outside
        return AttemptEnd(code, saved=saved)
    # Ranks that end for another one have its exit code, and may be faster; what they record as an error is their own.
    ended = [cause] if signal_name(code) else [cause, *sorted(found.values(), key=lambda one: one.time)]
    errors = ((one, outcomes.read_error(directory, one.rank)) for one in ended)
    cause, error = next((pair for pair in errors if pair[1]), (cause, cause.reason))
    return AttemptEnd(code, cause.rank, cause.host, saved, error)


def decide(ends: Mapping[int, AttemptEnd]) -> Decision:
    """What follows the last of ``ends``: those of a job's starts, by number.

    A start that something else has ended, such as SLURM when a node dies, has none.
    A fault of the job and a SIGTERM from outside say nothing of each other: two of one kind in a row end the job.
    """
    last, previous = ends[max(ends)], ends.get(max(ends) - 1)
    row = row_of(last.code)
    meaning = f"exit code {last.code}: {signal_name(last.code) or row.meaning}"
    if not last.is_fault:
        return Decision(row.restart is Restart.ALWAYS, (meaning,))
    of_host = sum(end.is_fault and end.host == last.host for end in ends.values())
    why = [
        f"{meaning}; " + (f"fault {of_host} of {last.host} (rank {last.rank})" if last.host else "no machine is named")
    ]
    if last.saved:
        why.append("a checkpoint was written since this start: it continues from there")
    elif previous is None or not previous.is_fault or (previous.code == TERMINATED) != (last.code == TERMINATED):
        why.append("no checkpoint was written since this start; the job is started once more")
    else:
        why.append("the second fault in a row, and no checkpoint was written in between: another start would fail too")
        return Decision(False, tuple(why))
    return Decision(True, tuple(why), (last.host,) if last.host and of_host >= EXCLUDED_AFTER else ())


def main(argv: Sequence[str]) -> int:
    """Print ``CODE restart|end HOSTS`` and, on the next lines, why; keep the history of the job in STATE."""
    state, start, launcher_code = Path(argv[0]), int(argv[1]), int(argv[2])
    directory, history = state / f"outcomes.{start}", state / HISTORY
    ended = outcomes.read_outcomes(directory)
    ends = {int(key): AttemptEnd(**value) for key, value in (read_json(history) if history.exists() else {}).items()}
    end = ends[start] = job_end(directory, launcher_code, ended, expected=1)
    write_json(history, {str(key): asdict(value) for key, value in ends.items()})
    decision = decide(ends)
    codes = " ".join(map(str, sorted({outcome.code for outcome in ended.values()}))) or "no exit codes"
    print(end.code, "restart" if decision.restart else "end", *decision.exclude)
    print(f"the ranks ended with {codes}, srun with {launcher_code}")
    alone = row_of(end.code) in (row_of(FAILED), row_of(INTERRUPTED))  # all ranks have agreed on the others
    failed = f"ended with exit code {end.code}" if alone else ""
    who = (
        [f"rank {end.rank} on {end.host}: {end.error or failed}"]
        if end.rank is not None and (end.error or failed)
        else []
    )
    print("\n".join([*decision.why, *who]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

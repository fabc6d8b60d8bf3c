"""How a job ends, and whether it starts again: the shared part of the batch scripts, with ranks that are one line of
shell."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.cluster.jobs import environment, sbatch_words, users_folder
from tests.cluster.machines import Cluster

pytestmark = pytest.mark.slurm


class Jobs:
    """Submits ranks that are one line of shell, two on two nodes unless said."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, users_folder(folder)
        self.log = folder / "log"

    def submit(self, line: str, *words: str, script: str = "nodes_srun", **variables: str) -> int:
        rank = self.folder / "rank.sh"
        rank.write_text(f"#!/usr/bin/env bash\n{line}\n", encoding="utf-8")
        rank.chmod(rank.stat().st_mode | stat.S_IXUSR)
        words = (*sbatch_words(self.log, 1, "--gpus-per-node=1", *words), f"launch/{script}.sbatch", str(rank), "word")
        return self.cluster.submit(*words, cwd=self.folder, env=environment(**variables))

    def end(self, job: int, timeout: float = 60) -> tuple[str, str, str]:
        """State, exit code and number of restarts at the end of a job."""
        told = self.cluster.wait_for(job, timeout, self.log)
        return told["JobState"], told["ExitCode"].split(":")[0], told["Restarts"]

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def wait_for_text(self, text: str, count: int = 1) -> None:
        self.cluster.wait_until(lambda: self.text().count(text) >= count, 40, self.text)

    def states(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("slurm-*"))


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Jobs:
    return Jobs(cluster, tmp_path)


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("exit $((SLURM_PROCID == 1 ? 1 : 0))", ("FAILED", "1", "0")),
        ("exit $((SLURM_PROCID == 1 ? 2 : 75))", ("FAILED", "2", "0")),
        ("exit 77", ("FAILED", "77", "0")),
        ("kill -KILL $$", ("FAILED", "137", "0")),
    ],
)
def test_an_end_that_is_final(jobs: Jobs, line: str, end: tuple[str, str, str]) -> None:
    assert jobs.end(jobs.submit(line)) == end, jobs.text()
    assert jobs.states() == []


@pytest.mark.parametrize("script", ["nodes_srun", "nodes_torchrun", "one_node"])
def test_ranks_ask_to_be_started_again(jobs: Jobs, script: str) -> None:
    """Also where torchrun is between them and the script; the last rank may take its time."""
    line = 'if [ -n "${SLURM_RESTART_COUNT:-}" ]; then echo "again $RANK/$WORLD_SIZE $1"; exit 0; fi; sleep $RANK; exit 75'
    job = jobs.submit(line, script=script)
    assert jobs.end(job) == ("COMPLETED", "0", "1"), jobs.text()
    ranks = 1 if script == "one_node" else 2
    assert [f"again {rank}/{ranks} word" in jobs.text() for rank in range(2)] == [True, ranks == 2]
    assert "*** STEP" not in jobs.text()  # nobody was killed
    assert jobs.states() == []


def test_restarts_are_counted(jobs: Jobs) -> None:
    """A hung rank (76) has its peers ended with it, and asks for a restart; the second is one too many."""
    job = jobs.submit("[ $RANK = 0 ] && exit 76; exec sleep 60", MAX_RESTARTS="1")
    assert jobs.end(job) == ("FAILED", "76", "1"), jobs.text()
    assert "not requeued: MAX_RESTARTS=1 are used up" in jobs.text()


@pytest.mark.parametrize("script", ["nodes_srun", "nodes_torchrun"])
def test_the_signal_reaches_every_rank(jobs: Jobs, script: str) -> None:
    """It comes again and again, to ranks with a handler and to one that has none yet; torchrun outlives it."""
    young = 'echo ready; while [ ! -e "$DS_TRAINER_STOP_FILE" ]; do sleep 0.1; done; echo saw $RANK; exit 75'
    again = '[ ! -e "$DS_TRAINER_STOP_FILE" ] && echo fresh && exit 0; exit 1'
    # Bash ignores a trap for a signal that was ignored at its start: a Python rank takes its place.
    handler = (
        "import os, signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: (print('got 0', flush=True), os._exit(75)))"
        "; print('ready', flush=True); time.sleep(60)"
    )
    line = f'[ -n "${{SLURM_RESTART_COUNT:-}}" ] && {{ {again}; }}; [ $RANK = 0 ] && exec python -c "{handler}"; {young}'
    job = jobs.submit(line, script=script)
    jobs.wait_for_text("ready", 2)
    for _ in range(2):
        jobs.cluster.hub("scancel", "--batch", "--signal=USR1", str(job))
    assert jobs.end(job) == ("COMPLETED", "0", "1"), jobs.text()
    assert "got 0" in jobs.text() and "saw 1" in jobs.text()
    assert jobs.text().count("fresh") == 2


def test_a_cancelled_job_stays_cancelled(jobs: Jobs) -> None:
    """Although its ranks, which get TERM, stop at a checkpoint and would like to be started again."""
    job = jobs.submit('trap "exit 75" TERM; echo ready; while :; do sleep 0.1; done')
    jobs.wait_for_text("ready", 2)
    jobs.cluster.hub("scancel", str(job))
    assert jobs.end(job)[0] == "CANCELLED", jobs.text()
    assert jobs.end(job)[2] == "0"


def test_what_cannot_start_says_why(jobs: Jobs) -> None:
    job = jobs.submit("exit 0", DS_TRAINER_VENV="/no/such")
    assert jobs.end(job)[:2] == ("FAILED", "1")
    assert "DS_TRAINER_VENV=/no/such is no virtual environment" in jobs.text()


def test_the_environment_is_prepared(jobs: Jobs, tmp_path: Path) -> None:
    """A file to activate, words of a container, nothing of the launcher that sbatch was called under."""
    activate = tmp_path / "activate.sh"
    activate.write_text("false; export LOADED=$UNSET_BEFORE,module\n", encoding="utf-8")
    line = 'echo "$LOADED $BOX $RANK of $WORLD_SIZE at $MASTER_ADDR, resume $DS_TRAINER_AUTO_RESUME"'
    job = jobs.submit(
        line, DS_TRAINER_ACTIVATE=str(activate), DS_TRAINER_CONTAINER="env BOX=box", RANK="7", MASTER_ADDR="elsewhere"
    )
    assert jobs.end(job) == ("COMPLETED", "0", "0"), jobs.text()
    for rank in range(2):
        assert f",module box {rank} of 2 at node1, resume 1" in jobs.text()

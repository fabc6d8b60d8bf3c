"""How a job ends, and whether it starts again: the shared part of the batch scripts, with ranks that are a few lines of
shell on two nodes. What takes seconds by itself is submitted first, and looked at last."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ds_trainer.cli.main import main
from tests.cluster.jobs import environment, sbatch_arguments, users_folder
from tests.cluster.machines import Cluster

pytestmark = [pytest.mark.extended, pytest.mark.slurm]

# Bash ignores a trap for a signal that was ignored at its start, so a Python rank has the handler.
HANDLER = """
import os, signal, time
def stop(number, frame):
    print("got", os.environ["RANK"], flush=True)
    os._exit(75)
signal.signal(signal.SIGUSR1, stop)
print("ready", flush=True)
time.sleep(100)
"""
IF_AGAIN = '[ -n "${SLURM_RESTART_COUNT:-}" ] &&'


class Job:
    """Ranks of one job; the lines are those of a shell script."""

    def __init__(
        self, cluster: Cluster, folder: Path, lines: str, script: str = "nodes_srun", **variables: str
    ) -> None:
        self._cluster, self._folder = cluster, users_folder(folder)
        self.log = folder / "log"
        rank = folder / "rank.sh"
        rank.write_text(f"#!/usr/bin/env bash\n{lines}\n", encoding="utf-8")
        rank.chmod(rank.stat().st_mode | stat.S_IXUSR)
        argv = (*sbatch_arguments(self.log, 1, "--gpus-per-node=1"), f"launch/{script}.sbatch", str(rank), "a word")
        self.number = cluster.submit(*argv, cwd=folder, env=environment(**variables))

    def end(self) -> tuple[str, str, str]:
        """State, exit code and number of restarts at its end."""
        job_state = self._cluster.wait_for(self.number, 240, self.log)
        return job_state["JobState"], job_state["ExitCode"].split(":")[0], job_state["Restarts"]

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def wait_until_ready(self) -> None:
        """Both ranks are at work."""
        self._cluster.wait_until(lambda: self.text().count("ready") >= 2, 120, self.text)

    def remaining_processes(self) -> list[str]:
        """What it left beside its log."""
        return sorted(path.name for path in self._folder.glob("slurm-*"))


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs that are started again, which takes seconds."""
    lines = {
        "again": f'{IF_AGAIN} echo "again $RANK/$WORLD_SIZE $1" && exit 0; sleep $RANK; exit 75',
        "hung": 'touch "$DS_TRAINER_OUTCOME_DIR/checkpoint-written"; [ $RANK = 0 ] && exit 76; exec sleep 100',
        "twice": "[ $RANK = 0 ] && exec sleep 100; kill -ABRT $$",
        "deaf": """
            touch "$DS_TRAINER_OUTCOME_DIR/checkpoint-written"
            if [ -n "${SLURM_RESTART_COUNT:-}" ]; then
                trap "echo ended from outside; exit 1" TERM
                for ((second = 0; second < 65; second++)); do sleep 1; done
                exit 0
            fi
            if [ $RANK = 1 ]; then until [ -e deaf ]; do sleep 0.1; done; kill -ABRT $$; fi
            trap "" TERM
            touch deaf
            exec sleep 100""",
        "signal": f"""
            {IF_AGAIN} {{ [ ! -e "$DS_TRAINER_STOP_FILE" ] && echo fresh && exit 0; exit 1; }}
            [ $RANK = 0 ] && exec python -c '{HANDLER}'
            echo ready
            while [ ! -e "$DS_TRAINER_STOP_FILE" ]; do sleep 0.1; done
            echo saw $RANK
            exit 75""",
    }
    limits = {"hung": {"MAX_RESTARTS": "1"}}
    scripts = {"signal": "nodes_torchrun"}
    return {
        name: Job(cluster, tmp_path_factory.mktemp(name), text, scripts.get(name, "nodes_srun"), **limits.get(name, {}))
        for name, text in lines.items()
    }


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ("exit $((RANK == 1 ? 1 : 0))", ("FAILED", "1", "0")),
        ("exit $((RANK == 1 ? 2 : 75))", ("FAILED", "2", "0")),
        ("exit 77", ("FAILED", "77", "0")),
        ('touch "$DS_TRAINER_OUTCOME_DIR/checkpoint-written"; exit 3', ("FAILED", "3", "0")),
    ],
)
def test_final_exit_codes_are_not_requeued(
    cluster: Cluster, jobs: dict[str, Job], tmp_path: Path, lines: str, end: tuple[str, str, str]
) -> None:
    job = Job(cluster, tmp_path, lines)
    assert job.end() == end, job.text()
    assert job.remaining_processes() == []


def test_ranks_without_an_outcome_have_failed(cluster: Cluster, jobs: dict[str, Job], tmp_path: Path) -> None:
    """With each rank dies the shell that would have written its exit code down.

    srun sends TERM to the rank that is left when the other dies. A rank that TERM reaches first leaves 143, or nothing,
    with 143 from srun. So both ranks ignore TERM, and both die at the same moment of the one clock that they have.
    """
    both_ignore = "trap '' TERM; own=deaf.${SLURM_RESTART_COUNT:-0}; touch $own.$RANK"
    both_are_here = "until [ -e $own.0 ] && [ -e $own.1 ]; do sleep 0.1; done"
    moment = "moment=$(($(stat -c %Y $own.0 $own.1 | sort -n | tail -1) + 3))"
    until = "until [ $(date +%s) -ge $moment ]; do :; done"
    lines = [both_ignore, both_are_here, moment, until, "kill -KILL $PPID $$"]
    job = Job(cluster, tmp_path, "\n".join(lines))
    assert job.end() == ("FAILED", "137", "1"), job.text()
    assert "the ranks ended with no exit codes, srun with 137" in job.text()
    assert job.remaining_processes() == []


def test_a_cancelled_job_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """Although its ranks, which get TERM, stop at a checkpoint and would like to be started again."""
    job = Job(cluster, tmp_path, 'trap "exit 75" TERM; echo ready; while :; do sleep 0.1; done')
    job.wait_until_ready()
    cluster.hub("scancel", str(job.number))
    state, _, restarts = job.end()
    assert (state, restarts) == ("CANCELLED", "0"), job.text()


def test_the_environment_is_prepared(cluster: Cluster, tmp_path: Path) -> None:
    """A file to activate, words of a container, nothing of the launcher that sbatch was called under."""
    activate = tmp_path / "activate.sh"
    activate.write_text("false; export LOADED=$UNSET_BEFORE,module\n", encoding="utf-8")
    line = (
        'echo "$LOADED $BOX $RANK of $WORLD_SIZE at $MASTER_ADDR,'
        ' resume $DS_TRAINER_AUTO_RESUME, end $DS_TRAINER_JOB_END"'
    )
    settings = {"DS_TRAINER_ACTIVATE": str(activate), "DS_TRAINER_CONTAINER": "env BOX=box"}
    job = Job(cluster, tmp_path, line, RANK="7", MASTER_ADDR="elsewhere", **settings)
    assert job.end() == ("COMPLETED", "0", "0"), job.text()
    for rank in range(2):
        assert f",module box {rank} of 2 at node1, resume 1, end 1" in job.text()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DS_TRAINER_VENV": "/no/such"}, "DS_TRAINER_VENV=/no/such is not a virtual environment"),
        ({"DS_TRAINER_ACTIVATE": "/no/such"}, "DS_TRAINER_ACTIVATE=/no/such is not a file"),
        ({"MAX_RESTARTS": "many"}, "MAX_RESTARTS=many must be a whole number"),
    ],
)
def test_jobs_that_cannot_start_report_why(
    cluster: Cluster, tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    job = Job(cluster, tmp_path, "exit 0", **variables)
    assert job.end() == ("FAILED", "1", "0")
    assert message in job.text()


def test_the_signal_reaches_every_rank(cluster: Cluster, jobs: dict[str, Job]) -> None:
    """Those with a handler, and by the file one that has none yet; torchrun outlives it. A second one changes nothing,
    and the next start finds no file."""
    job = jobs["signal"]
    job.wait_until_ready()
    for _ in range(2):
        cluster.hub("scancel", "--batch", "--signal=USR1", str(job.number), check=False)
    assert job.end() == ("COMPLETED", "0", "1"), job.text()
    assert "got 0" in job.text() and "saw 1" in job.text()
    assert job.text().count("asking the ranks") == 1
    assert job.text().splitlines().count("fresh") == 2


def test_ranks_can_request_a_requeue(jobs: dict[str, Job]) -> None:
    """The last one may take its time."""
    job = jobs["again"]
    assert job.end() == ("COMPLETED", "0", "1"), job.text()
    assert all(f"again {rank}/2 a word" in job.text() for rank in range(2))
    assert "*** STEP" not in job.text()  # nobody was killed
    assert job.remaining_processes() == []


def test_restarts_are_counted(jobs: dict[str, Job]) -> None:
    """A hung rank has its peers ended with it, and asks for a restart; the second is one too many."""
    job = jobs["hung"]
    assert job.end() == ("FAILED", "76", "1"), job.text()
    assert "not requeued: no restarts left (MAX_RESTARTS=1)" in job.text()


def test_a_crash_that_comes_back_without_a_checkpoint_ends_after_two(jobs: dict[str, Job]) -> None:
    job = jobs["twice"]
    assert job.end() == ("FAILED", "134", "1"), job.text()
    assert "SIGABRT; fault 2 of node2 (rank 1)" in job.text()
    assert "the second fault in a row" in job.text()
    assert job.remaining_processes() == []


def test_a_kill_that_slurm_repeats_does_not_hit_the_next_start(jobs: dict[str, Job]) -> None:
    """The other rank takes longer to end than slurmctld waits for the confirmation (MessageTimeout). So slurmctld sends
    the same kill again a minute later, when the next start is at work."""
    job = jobs["deaf"]
    assert job.end() == ("COMPLETED", "0", "1"), job.text()
    assert "Force Terminated" in job.text() and "ended from outside" not in job.text()
    assert job.remaining_processes() == []


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_generated_script_is_self_contained(cluster: Cluster, tmp_path: Path, capsys, launcher: str) -> None:
    """In a folder without launch/, with the script's own words and one more of sbatch's caller."""
    script = tmp_path / "which_rank.py"
    line = "import os, sys; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.environ['BOX'], sys.argv[1:])"
    script.write_text(line, encoding="utf-8")
    argv = ["--nodes", "2", "--nproc-per-node", "2", "--launcher", launcher, "--cpus-per-rank", "1", "--env", "BOX=a b"]
    assert (
        main(
            [
                "launch",
                "--slurm",
                *argv,
                "--sbatch-arg=--mem=1000",
                "--cpus-per-rank=1",
                str(script),
                "its",
                "own words",
            ]
        )
        == 0
    )
    (tmp_path / "job.sbatch").write_text(capsys.readouterr().out, encoding="utf-8")
    log = tmp_path / "log"
    sent = [f"--output={log}", f"--chdir={tmp_path}", "job.sbatch", "more"]
    job = cluster.submit(*sent, cwd=tmp_path, env=environment())
    job_state = cluster.wait_for(job, 120, log)
    text = log.read_text(encoding="utf-8")
    assert (job_state["JobState"], job_state["NumNodes"]) == ("COMPLETED", "2"), text
    for rank in range(4):
        assert f"{rank} of 4 a b ['its', 'own words', 'more']" in text

"""Supervision by ``ds-trainer launch``: the exit code is correct, and no process is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

import ds_trainer
from ds_trainer.launching import runner
from ds_trainer.launching.hosts import read_hostfile
from ds_trainer.launching.launch_plan import LaunchPlan
from ds_trainer.launching.launch_request import LaunchRequest, Target
from ds_trainer.launching.processes import end_processes, processes_of_job
from ds_trainer.launching.restarts import AttemptEnd, decide, job_code, job_end
from ds_trainer.utils.outcomes import Blame, RankOutcome, record_blame, record_checkpoint, record_error
from tests.launching import fake_launcher

# A rank: rank 1 does what the first word says, rank 0 waits for its end (or, with "all", does the same).
PROGRAM = """\
import os, signal, subprocess, sys, time
what, rank = sys.argv[1], int(os.environ["RANK"])
open(os.environ["SEEN"], "a").write(f"{rank} {os.environ.get('DS_TRAINER_AUTO_RESUME')}\\n")
if what == "stop":
    while not os.path.exists(os.environ["DS_TRAINER_STOP_FILE"]):
        time.sleep(0.05)
    time.sleep(0.3 * rank)
    sys.exit(75)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(os.environ["SEEN"] + ".ready", "a").write(f"{rank}")
    time.sleep(120)
if what == "forgets":
    subprocess.Popen(["sleep", "120"], start_new_session=True)
if what == "crash once" and os.environ.get("DS_TRAINER_AUTO_RESUME") != "1" and rank == 1:
    os.abort()
if what == "early" and rank == 0:
    time.sleep(4)
if rank == 1:
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "unseen":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(120)
    if what.isdigit():
        sys.exit(int(what))
"""


class Launch:
    """``ds-trainer launch`` with the fake launcher, two ranks of PROGRAM and a mark to find its processes by."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark, self.seen = folder, uuid.uuid4().hex, folder / "seen"
        (folder / "program.py").write_text(PROGRAM)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DS_TRAINER_", "SLURM_"))}
        paths = os.pathsep.join([str(Path(ds_trainer.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self.environment = clean | {"MARK": self.mark, "SEEN": str(self.seen), "PYTHONPATH": paths}
        self.environment["TMPDIR"] = str(folder)

    def start(self, what: str, *options: str, **environment: str) -> subprocess.Popen[str]:
        argv = [sys.executable, fake_launcher.__file__, "cli", "--nproc-per-node", "2", *options, "program.py", what]
        return subprocess.Popen(
            argv, cwd=self.folder, env=self.environment | environment, stderr=subprocess.PIPE, text=True
        )

    def run(self, what: str, *options: str, **environment: str) -> tuple[int, str]:
        process = self.start(what, *options, **environment)
        _, errors = process.communicate(timeout=60)
        assert self.remaining_processes() == [], errors
        assert not list(self.folder.glob("ds_trainer_launch-*")), errors
        return process.returncode, errors

    def remaining_processes(self) -> list[psutil.Process]:
        return [one for one in processes_of_job("MARK", self.mark) if one.status() != psutil.STATUS_ZOMBIE]

    def wait_for(self, path: Path, text: int) -> None:
        deadline = time.monotonic() + 40
        while not path.exists() or len(path.read_text()) < text:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def job(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def test_a_rank_that_ends_long_before_the_others_is_named(tmp_path: Path) -> None:
    """With code 0, which may be right, but the others may wait for it."""
    code, errors = Launch(tmp_path).run("early", PATIENCE="1")
    assert code == 0 and errors.count("rank 1 on ") == 1, errors
    assert "ended with exit code 0, and other ranks are still running." in errors


def test_a_successful_job_returns_0(job: Launch) -> None:
    code, errors = job.run("fine")
    assert code == 0, errors


def test_a_killed_rank_is_a_failure_even_if_the_launcher_returns_0(job: Launch) -> None:
    code, errors = job.run("killed", FAULT="lies")
    assert code == 128 + signal.SIGKILL
    assert "rank 1 on" in errors and "was killed by SIGKILL" in errors


def test_a_rank_without_an_outcome_is_a_failure_even_if_the_launcher_returns_0(job: Launch) -> None:
    """The wrapper process of a rank is killed: nothing records the outcome, and the rank ends with its wrapper."""
    code, errors = job.run("unseen", FAULT="lies")
    assert code == 1
    first = next(line for line in errors.splitlines() if line.startswith("ds-trainer launch: rank"))
    assert first.startswith(
        "ds-trainer launch: rank 1 recorded no outcome (1 of 2 ranks): it was killed, or the process"
    )
    assert first.endswith("; the launcher ended with exit code 0.")


@pytest.mark.cases(1)
@pytest.mark.parametrize("given", [2, 3, 75, 76, 77])
def test_exit_codes_survive_a_launcher_that_loses_them(job: Launch, given: int) -> None:
    assert job.run(str(given))[0] == given


def test_descendants_of_a_rank_end_with_it(job: Launch) -> None:
    assert job.run("forgets")[0] == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_ranks_and_prevents_restarts(job: Launch, number: signal.Signals) -> None:
    process = job.start("stop", "--max-restarts", "3", "--restart-preempted")
    job.wait_for(job.seen, 4)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert job.remaining_processes() == []
    assert job.seen.read_text().count("\n") == 2


def test_ctrl_c_leaves_no_process_even_if_a_rank_ignores_it_and_the_launcher_dies(job: Launch) -> None:
    process = job.start("stubborn")
    job.wait_for(Path(f"{job.seen}.ready"), 2)
    assert len(job.remaining_processes()) >= 6  # ours, the launcher, two ranks and what stands beside them
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, 75), errors
    assert job.remaining_processes() == []


@pytest.mark.extended
def test_ranks_end_when_launch_itself_is_killed(job: Launch) -> None:
    process = job.start("stubborn")
    job.wait_for(Path(f"{job.seen}.ready"), 2)
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(job.remaining_processes(), timeout=40)
    end_processes(alive)
    assert alive == []


@pytest.mark.extended
def test_a_crash_is_restarted_and_resumes(job: Launch) -> None:
    code, errors = job.run("crash once", "--max-restarts", "1")
    assert code == 0, errors
    assert sorted(job.seen.read_text().splitlines()) == ["0 1", "0 None", "1 1", "1 None"]
    assert "restart 1 of 1" in errors
    assert job.run("crash once")[0] == 128 + signal.SIGABRT


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("given", "options", "starts"),
    [
        *((2, [], 1), (77, [], 1), (75, [], 1), (75, ["--restart-preempted"], 2), (76, [], 2), (74, [], 2)),
        *((3, [], 1), (1, [], 1)),
    ],
)
def test_which_exit_codes_are_restarted(job: Launch, given: int, options: list[str], starts: int) -> None:
    code, errors = job.run(str(given), "--max-restarts", "1", *options)
    assert code == given, errors
    assert sum(line.startswith("1 ") for line in job.seen.read_text().splitlines()) == starts
    assert errors.count("restart 1 of 1") == starts - 1


def outcomes(*codes: int) -> dict[int, RankOutcome]:
    """Outcomes of ranks that ended one after another."""
    return {rank: RankOutcome(rank, code, "host", float(rank)) for rank, code in enumerate(codes)}


@pytest.mark.parametrize(
    ("launcher", "codes", "expected"),
    [
        (0, (0, 0), 0),
        (0, (0,), 1),  # nothing is known of rank 1
        (0, (), 1),
        (1, (0, 0), 1),
        (-9, (), 137),
        (1, (137, 143), 137),  # the first that failed, not the others that were ended for it
        (1, (143, 75), 75),
        (1, (1, 1, 2), 2),
        (1, (75, 77), 77),
        (0, (0, 3), 3),
        (1, (143, 134), 134),  # whoever ended a rank had a reason
        (1, (74, 134), 74),  # the rank that lost its GPU, not the others that NCCL's watchdog ended for it
        (1, (134, 139, 74), 134),
        (1, (74, 134, 1), 1),  # a Python error of one rank; the others lost the connection
        (1, (76, 137), 76),
        (1, (137, 77), 77),
    ],
)
def test_the_code_of_a_job(launcher: int, codes: tuple[int, ...], expected: int) -> None:
    assert job_code(launcher, outcomes(*codes), max(2, len(codes)))[0] == expected


def end(code: int, host: str = "a", saved: bool = False) -> AttemptEnd:
    return AttemptEnd(code, 0, host, saved)


@pytest.mark.parametrize("code", [74, 76, 134, 135, 137, 139])
def test_a_deterministic_fault_ends_after_two(code: int) -> None:
    """With a checkpoint before the first fault, and with none at all."""
    for saved in (True, False):
        ends = {0: end(code, saved=saved)}
        assert decide(ends).restart
        ends[1] = end(code)
        assert not decide(ends).restart
    assert decide({0: end(75, saved=True), 1: end(code)}).restart  # the start before was no fault
    assert decide({0: end(code), 2: end(code)}).restart  # something else has ended start 1
    assert decide({0: end(code), 1: end(143)}).restart  # somebody outside has ended start 1
    assert decide({0: end(code), 1: end(143), 2: end(code)}).restart
    assert not decide({0: end(143), 1: end(143)}).restart


def test_a_machine_that_fails_twice_is_excluded() -> None:
    ends = {0: end(134, "a", True), 1: end(139, "b", True)}
    assert decide(ends).exclude == ()
    decision = decide({**ends, 2: end(74, "a", True)})
    assert decision.restart and decision.exclude == ("a",)
    assert "fault 2 of a (rank 0)" in decision.why[0]
    assert decide({0: end(1, "a", True), 1: end(134, "a", True)}).exclude == ()  # the first was no fault


@pytest.mark.parametrize("code", [0, 1, 2, 3, 77, 130])
def test_what_ends_although_there_is_a_checkpoint(code: int) -> None:
    assert not decide({0: end(code, saved=True)}).restart


def test_a_hang_is_that_of_the_machine_that_the_others_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_TRAINER_OUTCOME_DIR", str(tmp_path))
    record_blame(Blame(1, "stopped", "it does not respond"))
    assert job_end(tmp_path, 1, outcomes(76, 137), 2) == AttemptEnd(76, 1, "stopped", False, "it does not respond")
    record_checkpoint()
    assert job_end(tmp_path, 1, outcomes(137, 76), 2).saved
    assert job_end(tmp_path, 1, outcomes(1, 76, 1), 3).code == 76
    assert job_end(tmp_path, 1, outcomes(143), 2) == AttemptEnd(
        143, saved=True
    )  # by somebody outside: no machine is named


def test_the_rank_with_the_error_is_named_although_others_ended_before_it(tmp_path: Path) -> None:
    """A rank that ends for another one has its exit code; the other one may get SIGTERM on its way out."""
    record_error(ValueError("x"), {"DS_TRAINER_OUTCOME_DIR": str(tmp_path), "RANK": "1"})
    for codes in ((1, 143), (1, 1)):
        found = outcomes(*codes)
        end = job_end(tmp_path, 1, found, 2)
        assert (end.code, end.rank, end.host, end.error) == (1, 1, found[1].host, "ValueError: x")
    assert job_end(tmp_path, 1, outcomes(137, 74), 2).rank == 0, "a kill, after which others may record errors"


def test_a_machine_that_failed_twice_is_replaced_by_a_spare_one(
    job: Launch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = job.folder / "hosts"
    hosts.write_text("a slots=2\nb slots=2\nc slots=2\n")
    request = LaunchRequest(Target("x.py"), nodes=2, hostfile=str(hosts), launcher="openmpi")
    plan = LaunchPlan(request, "openmpi", tuple(read_hostfile(str(hosts), None))[:2], False)
    assert plan.host_of(1).name == "a" and plan.host_of(2).name == "b"
    monkeypatch.setenv("PATH", str(job.folder))
    (job.folder / "mpirun").touch(0o755)  # only looked for
    spared = runner._without(plan, ("a",))
    assert [host.name for host in spared.hosts] == ["b", "c"] and spared.excluded == ("a",)
    assert runner._without(spared, ("b",)) is spared
    assert "no other machine is left" in capsys.readouterr().err


def test_a_signal_on_the_way_out_does_not_replace_the_exit_code() -> None:
    code = (
        "import os, signal, sys\nfrom ds_trainer.launching.supervision import Requests\nrequests = Requests()\n"
        "with requests.handled():\n    os.kill(os.getpid(), signal.SIGINT)\n    assert requests.any\n"
        "os.kill(os.getpid(), signal.SIGINT)\nsys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7


# -- shared files ------------------------------------------------------------------------------------------------------

# A wrapper of a rank that counts how often it looks at shared files. It waits 2 s for a rank that never ends.
COUNTING = """\
import json, os, pathlib, sys
from ds_trainer.launching import rank
folder, counts = os.environ["DS_TRAINER_ATTEMPT_DIR"], dict.fromkeys(("listed", "opened", "aborts"), 0)
def hook(event, args):
    if event in ("os.listdir", "os.scandir") and str(args[0]).startswith(folder):
        counts["listed"] += 1
    if event == "open" and str(args[0]).startswith(folder) and "r" in str(args[1]):
        counts["opened"] += 1
exists = os.path.exists
def counted(path):
    counts["aborts"] += str(path).endswith("abort")
    return exists(path)
os.path.exists = counted
sys.addaudithook(hook)
rank.POLL_SECONDS, rank.PEER_WAIT_SECONDS = 0.1, 2.0
code = rank.main([sys.argv[1]])
print(json.dumps([code, counts]))
"""
CHILD = """\
import os, sys, time
open(os.environ["READY"] + os.environ["RANK"], "w").close()
deadline = time.monotonic() + 30
while not os.path.exists(os.environ["GO"]) and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(float(os.environ["RANK"]) / 10)
sys.exit(75)
"""


def start_wrapper(folder: Path, rank: int, local_rank: int) -> subprocess.Popen[str]:
    """The wrapper of one of five ranks, of which the last one is never started."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "5", "MASTER_ADDR": "127.0.0.1"}
    shared = {"DS_TRAINER_ATTEMPT_DIR": str(folder), "DS_TRAINER_OUTCOME_DIR": str(folder / "outcomes")}
    files = {"READY": f"{folder}/ready-", "GO": f"{folder}/go", "PYTHONPATH": str(Path(ds_trainer.__file__).parents[1])}
    environment = {**os.environ, **place, **shared, **files, "MASTER_PORT": "1", "DS_TRAINER_JOB_ID": folder.name}
    command = [sys.executable, "-c", COUNTING, str(folder / "child.py")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def wait_until(path: Path) -> None:
    deadline = time.monotonic() + 40
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_machine(folder: Path) -> list[subprocess.Popen[str]]:
    """Four wrappers on this machine, all of which know each other."""
    (folder / "outcomes").mkdir()
    (folder / "child.py").write_text(CHILD)
    wrappers = [start_wrapper(folder, 0, 0)]
    wait_until(folder / "ready-0")
    wrappers += [start_wrapper(folder, rank, rank) for rank in (1, 2, 3)]
    for rank in (1, 2, 3):
        wait_until(folder / f"ready-{rank}")
    return wrappers


def test_one_wrapper_of_a_machine_looks_at_shared_files_and_opens_none(tmp_path: Path) -> None:
    wrappers = start_machine(tmp_path)
    time.sleep(1.0)
    (tmp_path / "go").touch()
    found = [json.loads(wrapper.communicate(timeout=60)[0]) for wrapper in wrappers]
    assert [code for code, _ in found] == [75] * 4
    counts = [one for _, one in found]
    assert [one["opened"] for one in counts] == [0] * 4
    assert counts[0]["aborts"] > 5 and 2 <= counts[0]["listed"] <= 12, "the first one looks"
    assert all(one["aborts"] == 0 for one in counts[1:]), "the others do not"
    # Rank 0 gives up first. From then on the others look themselves, and end a few tenths of a second later.
    assert all(one["listed"] <= 4 for one in counts[1:])


def test_all_ranks_of_a_machine_end_if_the_job_is_aborted(tmp_path: Path) -> None:
    wrappers = start_machine(tmp_path)
    (tmp_path / "abort").touch()
    codes = [json.loads(wrapper.communicate(timeout=30)[0])[0] for wrapper in wrappers]
    assert codes == [128 + signal.SIGTERM] * 4


def test_the_others_look_for_themselves_if_the_first_wrapper_is_killed(tmp_path: Path) -> None:
    wrappers = start_machine(tmp_path)
    wrappers[0].kill()
    wrappers[0].wait()
    (tmp_path / "abort").touch()
    codes = [json.loads(wrapper.communicate(timeout=30)[0])[0] for wrapper in wrappers[1:]]
    assert codes == [128 + signal.SIGTERM] * 3

"""``ds-trainer launch``: choose, start, watch, start again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from ds_trainer.launching.choosing import Plan, choose
from ds_trainer.launching.commands import build
from ds_trainer.launching.job import CONNECTION, JOB_ID, SHARED_NAME, STOP_FILE, Job
from ds_trainer.launching.request import LaunchRequest
from ds_trainer.launching.supervision import Requests, Supervisor, say
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE, REQUEUE, STOPPED

CLEAN_UP_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


def print_command(request: LaunchRequest) -> None:
    """Print the command that :func:`run` would run, alone on standard output. Files that it reads are written and stay.

    Raises:
        ConfigError: it cannot be started like that here.
    """
    plan = choose(request, os.environ)
    directory = _job_directory(plan)
    told = {CONNECTION: "1"} if plan.launcher == "pdsh" else {}
    print(build(plan, directory, told, os.environ).text())
    if directory.is_dir():
        print(f"It reads the files in {directory}; remove them afterwards.", file=sys.stderr)


def run(request: LaunchRequest) -> int:
    """Run the job of ``request`` to its end, with as many restarts as it allows; gives its exit code.

    Raises:
        ConfigError: it cannot be started like that here.
    """
    plan = choose(request, os.environ)
    directory = _job_directory(plan)
    directory.mkdir(parents=True)
    stop_file = os.environ.get(STOP_FILE)
    job = Job(directory, Path(stop_file) if stop_file else directory / "stop")
    requests = Requests()
    pause = _FIRST_PAUSE
    try:
        with requests.heard():
            for number in range(request.max_restarts + 1):
                code = _run_once(plan, job, number, requests)
                if number == request.max_restarts or requests.any or not starts_again(code, request.restart_preempted):
                    break
                say(f"exit code {code}: restart {number + 1} of {request.max_restarts} in {pause:.0f} s.")
                _pause(pause, requests)
                if requests.any:
                    break
                pause = min(2 * pause, _LONGEST_PAUSE)
    finally:
        job.remove()
    return code


def starts_again(code: int, preempted: bool) -> bool:
    """Whether a job that ended with ``code`` is started again here: crashes and hangs are, what would fail again or was
    asked for is not, and what was preempted is whoever preempted it to start again, unless ``preempted``."""
    return code not in (DONE, CANNOT_WORK, STOPPED) and (code != REQUEUE or preempted)


def _run_once(plan: Plan, job: Job, number: int, requests: Requests) -> int:
    attempt = job.attempt(number)
    command = build(plan, attempt.directory, attempt.environment(), os.environ)
    say(shlex.join(command.words))
    clean_up = (lambda: _clean_up_over_pdsh(plan, job)) if plan.launcher == "pdsh" else None
    return Supervisor(command, attempt, plan.ranks_started, requests, not plan.is_local, clean_up).run()


def _job_directory(plan: Plan) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    if plan.request.job_dir is not None:
        return Path(plan.request.job_dir).absolute() / name
    # Several machines share the working directory, or the program would not be there.
    return (
        Path(tempfile.gettempdir()) / f"ds_trainer_launch-{name}" if plan.is_local else Path.cwd() / SHARED_NAME / name
    )


def _clean_up_over_pdsh(plan: Plan, job: Job) -> None:
    """A pdsh that is killed leaves its commands running: end what carries this job's mark on any machine."""
    command = shlex.join([sys.executable, "-m", "ds_trainer.launching.clean_up", JOB_ID, job.id])
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    names = ",".join(host.name for host in plan.hosts)
    words = ["pdsh", "-S", "-R", "ssh", "-w", names, f"PYTHONPATH={shlex.quote(path)} {command}"]
    environment = os.environ | {"PDSH_SSH_ARGS_APPEND": "-o BatchMode=yes -o ConnectTimeout=10"}
    try:
        done = subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=CLEAN_UP_SECONDS,
            check=False,
            start_new_session=True,
        )
        code: int | str = done.returncode
    except subprocess.TimeoutExpired:
        code = f"nothing within {CLEAN_UP_SECONDS:.0f} s"
    if code != 0:
        say(f"cleaning up on {names} gave {code}: look for processes there that have {JOB_ID}={job.id}.")


def _pause(seconds: float, requests: Requests) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not requests.any:
        time.sleep(0.1)

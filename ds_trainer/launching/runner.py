"""``ds-trainer launch``: select a launcher, start it, supervise it, and restart it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from ds_trainer.launching.commands import build
from ds_trainer.launching.job import CONNECTION, JOB_ID, SHARED_NAME, STOP_FILE, Job
from ds_trainer.launching.launch_plan import LaunchPlan, plan_launch
from ds_trainer.launching.launch_request import LaunchRequest
from ds_trainer.launching.supervision import Requests, Supervisor, print_message
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE, REQUEUE, STOPPED

CLEAN_UP_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


def print_command(request: LaunchRequest) -> None:
    """Print the command that :func:`run` would start on standard output. The files that the command reads are kept.

    Raises:
        ConfigError: the request does not fit this environment.
    """
    plan = plan_launch(request, os.environ)
    directory = _job_directory(plan)
    variables = {CONNECTION: "1"} if plan.launcher == "pdsh" else {}
    print(build(plan, directory, variables, os.environ).text())
    if directory.is_dir():
        print(f"The command reads the files in {directory}; remove them afterwards.", file=sys.stderr)


def run(request: LaunchRequest) -> int:
    """Run the job of ``request``, with up to ``max_restarts`` restarts; returns its exit code.

    Raises:
        ConfigError: the request does not fit this environment.
    """
    plan = plan_launch(request, os.environ)
    directory = _job_directory(plan)
    directory.mkdir(parents=True)
    stop_file = os.environ.get(STOP_FILE)
    job = Job(directory, Path(stop_file) if stop_file else directory / "stop")
    requests = Requests()
    pause = _FIRST_PAUSE
    try:
        with requests.handled():
            for number in range(request.max_restarts + 1):
                code = _run_once(plan, job, number, requests)
                if (
                    number == request.max_restarts
                    or requests.any
                    or not should_restart(code, request.restart_preempted)
                ):
                    break
                print_message(f"exit code {code}; restart {number + 1} of {request.max_restarts} in {pause:.0f} s.")
                _pause(pause, requests)
                if requests.any:
                    break
                pause = min(2 * pause, _LONGEST_PAUSE)
    finally:
        job.remove()
    return code


def should_restart(code: int, preempted: bool) -> bool:
    """Whether to restart a job that ended with ``code``: yes after crashes and hangs; no after success, a request that
    cannot work, or a stop by the user. A preempted job is left to the scheduler unless ``preempted``.
    """
    return code not in (DONE, CANNOT_WORK, STOPPED) and (code != REQUEUE or preempted)


def _run_once(plan: LaunchPlan, job: Job, number: int, requests: Requests) -> int:
    attempt = job.attempt(number)
    command = build(plan, attempt.directory, attempt.environment(), os.environ)
    print_message(shlex.join(command.argv))
    clean_up = (lambda: _clean_up_over_pdsh(plan, job)) if plan.launcher == "pdsh" else None
    return Supervisor(command, attempt, plan.ranks_started, requests, not plan.is_local, clean_up).run()


def _job_directory(plan: LaunchPlan) -> Path:
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    if plan.request.job_dir is not None:
        return Path(plan.request.job_dir).absolute() / name
    # Several machines must share the working directory, since the program is in it.
    return (
        Path(tempfile.gettempdir()) / f"ds_trainer_launch-{name}" if plan.is_local else Path.cwd() / SHARED_NAME / name
    )


def _clean_up_over_pdsh(plan: LaunchPlan, job: Job) -> None:
    """End the processes of this job on every machine: a pdsh that is killed leaves its remote commands running."""
    command = shlex.join([sys.executable, "-m", "ds_trainer.launching.clean_up", JOB_ID, job.id])
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    names = ",".join(host.name for host in plan.hosts)
    argv = ["pdsh", "-S", "-R", "ssh", "-w", names, f"PYTHONPATH={shlex.quote(path)} {command}"]
    environment = os.environ | {"PDSH_SSH_ARGS_APPEND": "-o BatchMode=yes -o ConnectTimeout=10"}
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=CLEAN_UP_SECONDS,
            check=False,
            start_new_session=True,
        )
        code: int | str = done.returncode
    except subprocess.TimeoutExpired:
        code = f"no result within {CLEAN_UP_SECONDS:.0f} s"
    if code != 0:
        print_message(f"cleaning up on {names} returned {code}: check there for processes with {JOB_ID}={job.id}.")


def _pause(seconds: float, requests: Requests) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not requests.any:
        time.sleep(0.1)

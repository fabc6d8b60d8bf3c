"""``ds-trainer launch``: select a launcher, start it, supervise it, and restart it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds_trainer.launching.commands import build
from ds_trainer.launching.job import CONNECTION, JOB_ID, SHARED_NAME, STOP_FILE, LaunchedJob
from ds_trainer.launching.launch_plan import LaunchPlan, plan_launch
from ds_trainer.launching.launch_request import LaunchRequest
from ds_trainer.launching.restarts import EXCLUDED_AFTER, AttemptEnd, decide
from ds_trainer.launching.supervision import Requests, Supervisor, print_message
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import REQUEUE
from ds_trainer.utils.printable import shown

CLEAN_UP_SECONDS = 30.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0


def print_command(request: LaunchRequest) -> None:
    """Print the command that :func:`run` would start, and the files that it would write for it; writes none.

    Raises:
        ConfigError: the request does not fit this environment.
    """
    plan = plan_launch(request, os.environ, starts=False)
    variables = {CONNECTION: "1"} if plan.launcher == "pdsh" else {}
    command = build(plan, _job_directory(plan), variables, os.environ)
    for path, text in command.files.items():
        print(shown(f"# launch writes {path}:\n" + "".join(f"#   {line}\n" for line in text.splitlines())), end="")
    print(shown(command.text()))


def run(request: LaunchRequest) -> int:
    """Run the job of ``request``, with up to ``max_restarts`` restarts; returns its exit code.

    Raises:
        ConfigError: the request does not fit this environment.
    """
    plan = plan_launch(request, os.environ)
    directory = _job_directory(plan)
    directory.mkdir(parents=True)
    stop_file = os.environ.get(STOP_FILE)
    job = LaunchedJob(directory, Path(stop_file) if stop_file else directory / "stop")
    requests = Requests()
    pause = _FIRST_PAUSE
    ends: dict[int, AttemptEnd] = {}
    try:
        with requests.handled():
            for number in range(request.max_restarts + 1):
                end = _run_once(plan, job, number, requests)
                if end.rank is not None:  # the plan may have another name for the machine than the machine itself
                    end = replace(end, host=plan.host_of(end.rank).name)
                ends[number] = end
                decision = decide(ends)
                # A preempted job is left to the scheduler.
                wanted = decision.restart and (end.code != REQUEUE or request.restart_preempted)
                if end.is_fault and not requests.any:
                    print_message("; ".join(decision.why) + ".")
                if number == request.max_restarts or requests.any or not wanted:
                    break
                plan = _without(plan, decision.exclude)
                print_message(f"exit code {end.code}; restart {number + 1} of {request.max_restarts} in {pause:.0f} s.")
                deadline = time.monotonic() + pause
                while time.monotonic() < deadline and not requests.any:
                    time.sleep(0.1)
                if requests.any:
                    break
                pause = min(2 * pause, _LONGEST_PAUSE)
    finally:
        job.remove()
    return end.code


def _without(plan: LaunchPlan, names: Sequence[str]) -> LaunchPlan:
    """``plan`` on other machines than ``names``, if the hostfile or the allocation has enough of them."""
    excluded = (*plan.excluded, *(name for name in names if name not in ("localhost", *plan.excluded)))
    if excluded == plan.excluded:
        return plan
    try:
        spared = plan_launch(plan.request, os.environ, excluded)
    except ConfigError:
        spared = None
    listed = ", ".join(names)
    if spared is None or len(spared.hosts) < len(plan.hosts):
        print_message(
            f"{listed} has failed {EXCLUDED_AFTER} times, but no other machine is left for its ranks: it is used "
            "again. Replace it, or set --nodes to fewer than the machines that there are, to have spare ones."
        )
        return plan
    print_message(f"{listed} has failed {EXCLUDED_AFTER} times and is not used again.")
    return spared


def _run_once(plan: LaunchPlan, job: LaunchedJob, number: int, requests: Requests) -> AttemptEnd:
    attempt = job.attempt(number)
    command = build(plan, attempt.directory, attempt.environment(), os.environ)
    command.write_files()
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


def _clean_up_over_pdsh(plan: LaunchPlan, job: LaunchedJob) -> None:
    """End the processes of this job on every machine: a pdsh that is killed leaves its remote commands running."""
    command = shlex.join([sys.executable, "-m", "ds_trainer.launching.processes", JOB_ID, job.id])
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

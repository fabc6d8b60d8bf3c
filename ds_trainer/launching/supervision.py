"""Supervises a launcher and its ranks: passes on signals, derives the exit code, and leaves no process running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

from ds_trainer.launching.commands import LaunchCommand
from ds_trainer.launching.job import JOB_ID, Attempt
from ds_trainer.launching.processes import (
    adopt_orphans,
    end_descendants,
    end_processes,
    prepare_child,
    processes_of_job,
)
from ds_trainer.launching.restarts import AttemptEnd, job_end
from ds_trainer.utils.errors import listed
from ds_trainer.utils.exit_codes import DONE
from ds_trainer.utils.outcomes import RankOutcome, read_error, read_outcomes, recording
from ds_trainer.utils.printable import shown
from ds_trainer.utils.units import counted

POLL_SECONDS = 0.2
# How long the launcher may continue after a rank has failed.
FAILURE_SECONDS = 30.0
TERMINATION_SECONDS = 45.0  # torchrun and deepspeed wait 30 s for their ranks
REMOTE_SECONDS = 15.0


def print_message(message: str) -> None:
    """Print one line of ``ds-trainer launch`` itself."""
    print(f"ds-trainer launch: {shown(message)}", file=sys.stderr, flush=True)


class Requests:
    """Signals that ``ds-trainer launch`` has received: requests to end the job, or to stop it at a checkpoint."""

    def __init__(self) -> None:
        self.to_end: list[signal.Signals] = []
        self.to_stop = 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Install the signal handlers during a block. Main thread only.

        A signal that has asked for the end is ignored afterwards: one more would kill this process on its way out, and
        a caller would lose the exit code. ``salloc`` returns 0 for a program that a signal has killed.
        """
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if number in self.to_end else handler)

    @property
    def any(self) -> bool:
        """Whether the job was asked to stop or to end."""
        return bool(self.to_end) or self.to_stop > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.to_stop += 1
        else:
            self.to_end.append(signal.Signals(number))


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Supervisor:
    """Runs one attempt of a job and supervises its ranks.

    Args:
        command: starts the launcher.
        attempt: has the directory in which the ranks record their outcomes.
        expected: the ranks that this launcher starts.
        requests: the signals received; shared by all attempts of the job.
        remote: whether some ranks are on other machines.
        clean_up: ends processes of this job on other machines; called unless all ranks have recorded an outcome.
    """

    def __init__(
        self,
        command: LaunchCommand,
        attempt: Attempt,
        expected: Sequence[int],
        requests: Requests,
        remote: bool = False,
        clean_up: Callable[[], None] | None = None,
    ) -> None:
        self.command, self.attempt, self.expected = command, attempt, expected
        self.requests, self.remote, self.clean_up = requests, remote, clean_up
        self._handled_end = 0
        self._stop_requested = False
        self._deadline: float | None = None
        self._told = False  # that a rank has ended long before the others
        self._known: dict[int, RankOutcome] = {}  # so that a poll does not open the files of all ranks

    def run(self) -> AttemptEnd:
        """Run the launcher until it ends; returns how the job ended."""
        adopt_orphans()
        environment = os.environ | self.command.environment
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of the world of one in which this process runs
            environment.pop(name, None)
        launcher = subprocess.Popen(
            self.command.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches this process only
            preexec_fn=partial(prepare_child, signal.SIGTERM),
        )
        try:
            while launcher.poll() is None:
                self._handle_requests(launcher)
                self._end_stalled(launcher)
                time.sleep(POLL_SECONDS)
        finally:
            # End all processes of the job on all machines, once the launcher has ended or an error was raised.
            complete = launcher.poll() is not None and self._is_complete()
            if not complete:
                self.attempt.abort()
                self._signal(launcher, signal.SIGTERM)
                if self.clean_up is not None:
                    self.clean_up()
                if self.remote and (self._outcomes() or processes_of_job(JOB_ID, self.attempt.job.id)):
                    _wait(self._is_complete, REMOTE_SECONDS)
            end_processes(processes_of_job(JOB_ID, self.attempt.job.id))
            end_descendants()
            launcher.wait()
        return self._end(launcher.returncode)

    # -- while it runs --------------------------------------------------------------------------------------------

    def _handle_requests(self, launcher: subprocess.Popen[bytes]) -> None:
        """Act on signals: first stop at a checkpoint, then end the launcher, then kill."""
        if self.requests.any and not self._stop_requested:
            self._stop_requested = True
            with recording("the request to stop"):
                self.attempt.job.stop_file.touch()
            print_message(
                "stopping at a checkpoint. A second signal ends the launcher, a third one kills all processes."
            )
        while self._handled_end < len(self.requests.to_end):
            self._handled_end += 1
            if self._handled_end == 2:
                print_message("ending the launcher.")
                self._signal(launcher, signal.SIGTERM)
            elif self._handled_end >= 3:
                print_message("killing all processes.")
                self._kill(launcher)

    def _end_stalled(self, launcher: subprocess.Popen[bytes]) -> None:
        """End a launcher that keeps waiting for ranks which wait for a failed rank, such as pdsh."""
        if self._deadline is None:
            failed = [outcome for outcome in self._outcomes().values() if outcome.code != DONE]
            if failed:
                self._deadline = time.monotonic() + FAILURE_SECONDS
            early = min(self._known.values(), key=lambda one: one.time, default=None)
            if early and time.time() - early.time > FAILURE_SECONDS and not self._told:
                self._told = True  # it may have left before the others met; they wait for it then
                print_message(f"{early}, and other ranks are still running.")
        elif time.monotonic() > self._deadline:
            print_message(
                f"a rank failed {FAILURE_SECONDS:.0f} s ago and others are still running; ending the launcher."
            )
            self._signal(launcher, signal.SIGTERM)
            self._deadline = float("inf")
            if _wait(lambda: launcher.poll() is not None, TERMINATION_SECONDS):
                return
            self._kill(launcher)

    def _signal(self, launcher: subprocess.Popen[bytes], number: signal.Signals) -> None:
        try:
            os.killpg(launcher.pid, number)  # deepspeed's runner does not forward signals to its children
        except ProcessLookupError:
            return

    def _kill(self, launcher: subprocess.Popen[bytes]) -> None:
        self.attempt.abort()
        self._signal(launcher, signal.SIGTERM)  # the only way to end what a launcher runs on other machines
        _wait(lambda: launcher.poll() is not None, 2.0)
        self._signal(launcher, signal.SIGKILL)

    # -- after it -------------------------------------------------------------------------------------------------

    def _outcomes(self) -> dict[int, RankOutcome]:
        self._known = read_outcomes(self.attempt.outcome_dir, self._known)
        return self._known

    def _is_complete(self) -> bool:
        return set(self.expected) <= set(self._outcomes())

    def _end(self, launcher_code: int) -> AttemptEnd:
        outcomes = read_outcomes(self.attempt.outcome_dir)  # again: a wrapper may correct what its rank has recorded
        end = job_end(self.attempt.outcome_dir, launcher_code, outcomes, len(self.expected))
        missing = sorted(set(self.expected) - set(outcomes))
        if missing:  # the launcher may have ended the others for it
            of_all = f"{len(missing)} of {counted(len(self.expected), 'rank')}"
            print_message(
                f"rank {listed(missing, 8)} recorded no outcome ({of_all}): "
                f"it was killed, or the process that watches it; the launcher ended with {_shown(launcher_code)}."
            )
        # The cause comes first: ranks that end for another one may be faster.
        ended = sorted(outcomes.values(), key=lambda outcome: (outcome.rank != end.rank, outcome.time))
        for outcome in ended[:8]:
            if outcome.code != DONE:
                print_message(f"{outcome}.")
        errors = ((outcome.rank, read_error(self.attempt.outcome_dir, outcome.rank)) for outcome in ended)
        rank, error = (end.rank, end.error) if end.error else next((entry for entry in errors if entry[1]), (None, ""))
        if error:  # the cause, as the last line
            print_message(f"rank {rank} failed: {error}")
        return end


def _shown(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"{signal.Signals(-code).name}"


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True

"""Running a launcher and its ranks: signals on their way in, exit codes on their way out, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ds_trainer.launching.commands import LaunchCommand
from ds_trainer.launching.job import JOB_ID, Attempt
from ds_trainer.launching.processes import (
    die_with_parent,
    end_descendants,
    end_processes,
    ignore_user_signal,
    keep_orphans,
    processes_of_job,
)
from ds_trainer.utils.exit_codes import CANNOT_WORK, DONE, FAILED, HUNG, REQUEUE, STOPPED
from ds_trainer.utils.outcomes import Outcome, read_outcomes

LOOK_SECONDS = 0.2
# A rank has failed and the launcher goes on: how long its other ranks may take to notice.
FAILURE_SECONDS = 30.0
TERMINATION_SECONDS = 45.0  # torchrun and deepspeed give their ranks 30
REMOTE_SECONDS = 15.0
# A rank gives one of these when all ranks have agreed on it (2: when nothing can be done about it), so one will do; the
# launcher may have killed the others for it.
_SAID_FOR_ALL = (CANNOT_WORK, STOPPED, REQUEUE, HUNG)


def say(message: str) -> None:
    """One line of our own among those of the job."""
    print(f"ds-trainer launch: {message}", file=sys.stderr, flush=True)


class Requests:
    """Signals that ``ds-trainer launch`` has got: how often it was asked to end, and whether to stop."""

    def __init__(self) -> None:
        self.to_end: list[signal.Signals] = []
        self.to_stop = 0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listen during a block. Main thread only."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def any(self) -> bool:
        """Whether somebody wants the job to stop."""
        return bool(self.to_end) or self.to_stop > 0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.to_stop += 1
        else:
            self.to_end.append(signal.Signals(number))


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Supervisor:
    """One attempt: runs ``command``, watches over ``expected`` ranks.

    Args:
        command: the launcher.
        attempt: where the ranks write their ends.
        expected: the ranks that are started from here.
        requests: signals, which count on from one attempt to the next.
        elsewhere: whether some of the ranks are on other machines.
        clean_up: ends what this job may have left on other machines; called when not all ranks came to an end.
    """

    def __init__(
        self,
        command: LaunchCommand,
        attempt: Attempt,
        expected: Sequence[int],
        requests: Requests,
        elsewhere: bool = False,
        clean_up: Callable[[], None] | None = None,
    ) -> None:
        self.command, self.attempt, self.expected = command, attempt, expected
        self.requests, self.elsewhere, self.clean_up = requests, elsewhere, clean_up
        self._answered_end = 0
        self._asked_to_stop = False
        self._deadline: float | None = None

    def run(self) -> int:
        """Run it to its end; gives the exit code of the job, in the words of :mod:`ds_trainer.utils.exit_codes`."""
        keep_orphans()
        environment = os.environ | self.command.environment
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of a world of one, in which we were started
            environment.pop(name, None)
        launcher = subprocess.Popen(
            self.command.words,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for us to pass on
            preexec_fn=_prepare_launcher,
        )
        try:
            while launcher.poll() is None:
                self._answer(launcher)
                self._end_what_hangs(launcher)
                time.sleep(LOOK_SECONDS)
        finally:
            self._clear(launcher)
        return self._code(launcher.returncode)

    # -- while it runs --------------------------------------------------------------------------------------------

    def _answer(self, launcher: subprocess.Popen[bytes]) -> None:
        """Do what signals ask for: stop at a checkpoint, then end the launcher, then kill."""
        if self.requests.any and not self._asked_to_stop:
            self._asked_to_stop = True
            self.attempt.job.stop_file.touch()
            say("the ranks are asked to stop at a checkpoint. A second signal ends the launcher, a third one kills.")
        while self._answered_end < len(self.requests.to_end):
            self._answered_end += 1
            if self._answered_end == 2:
                say("the launcher is told to end.")
                self._tell(launcher, signal.SIGTERM)
            elif self._answered_end >= 3:
                say("everything is killed.")
                self._kill(launcher)

    def _end_what_hangs(self, launcher: subprocess.Popen[bytes]) -> None:
        """A launcher may wait for ranks that wait for one that has failed: on another machine, under pdsh."""
        if self._deadline is None:
            failed = [outcome for outcome in self._outcomes().values() if outcome.code != DONE]
            if failed:
                self._deadline = time.monotonic() + FAILURE_SECONDS
        elif time.monotonic() > self._deadline:
            say(f"a rank has failed {FAILURE_SECONDS:.0f} s ago and others go on: the launcher is told to end.")
            self._tell(launcher, signal.SIGTERM)
            self._deadline = float("inf")
            if _wait(lambda: launcher.poll() is not None, TERMINATION_SECONDS):
                return
            self._kill(launcher)

    def _tell(self, launcher: subprocess.Popen[bytes], number: signal.Signals) -> None:
        try:
            os.killpg(launcher.pid, number)  # deepspeed's runner does not pass it on to what it started
        except ProcessLookupError:
            return

    def _kill(self, launcher: subprocess.Popen[bytes]) -> None:
        self.attempt.abort()
        self._tell(launcher, signal.SIGTERM)  # ends what a launcher has on other machines, as nothing else can
        _wait(lambda: launcher.poll() is not None, 2.0)
        self._tell(launcher, signal.SIGKILL)

    # -- after it -------------------------------------------------------------------------------------------------

    def _clear(self, launcher: subprocess.Popen[bytes]) -> None:
        """Leave no process behind, here or elsewhere, once the launcher has ended (or an error ends us)."""
        complete = launcher.poll() is not None and self._is_complete()
        if not complete:
            self.attempt.abort()
            self._tell(launcher, signal.SIGTERM)
            if self.clean_up is not None:
                self.clean_up()
            if self.elsewhere and self._someone_began():
                _wait(self._is_complete, REMOTE_SECONDS)
        end_processes(processes_of_job(JOB_ID, self.attempt.job.id))
        end_descendants()
        launcher.wait()

    def _someone_began(self) -> bool:
        return bool(self._outcomes()) or bool(processes_of_job(JOB_ID, self.attempt.job.id))

    def _outcomes(self) -> dict[int, Outcome]:
        return read_outcomes(self.attempt.outcome_dir)

    def _is_complete(self) -> bool:
        return set(self.expected) <= set(self._outcomes())

    def _code(self, launcher_code: int) -> int:
        outcomes = self._outcomes()
        for outcome in sorted(outcomes.values(), key=lambda outcome: outcome.time)[:8]:
            if outcome.code != DONE:
                say(f"{outcome}.")
        missing = sorted(set(self.expected) - set(outcomes))
        if missing:
            listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            say(
                f"the launcher ended with {_shown(launcher_code)}, and of {len(missing)} of {len(self.expected)} ranks "
                f"nothing is known ({listed})."
            )
        return job_code(launcher_code, outcomes, self.expected)


def job_code(launcher_code: int, outcomes: dict[int, Outcome], expected: Sequence[int]) -> int:
    """The truth about a job, from what its launcher gave (negative: killed by that signal) and how its ranks ended.

    Success is only where every rank says so. What ranks agree on counts before the end of the first that failed.
    """
    codes = {outcome.code for outcome in outcomes.values()}
    for code in _SAID_FOR_ALL:
        if code in codes:
            return code
    failed = [outcome for outcome in outcomes.values() if outcome.code != DONE]
    if failed:
        return min(failed, key=lambda outcome: outcome.time).code
    own = launcher_code if launcher_code >= 0 else 128 - launcher_code
    if own == DONE and not set(expected) <= set(outcomes):
        return FAILED
    return own


def _prepare_launcher() -> None:
    ignore_user_signal()  # torchrun and deepspeed would die of it
    die_with_parent(signal.SIGTERM)


def _shown(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"{signal.Signals(-code).name}"


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True

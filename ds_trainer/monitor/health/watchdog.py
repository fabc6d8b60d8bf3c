"""The hang watchdog: detects that a job has stalled, finds the rank it waits for, and writes stacks of all ranks.

Each rank has two threads, neither of which ever enters a collective:

* One exchanges data with the other ranks through the store of the process group. It regularly publishes a pulse (step,
  phase, stack of the training thread), checks that the pulse of the next rank changes (which finds a stopped process,
  whatever the others are doing), and checks whether a rank has declared a hang.
* The other one watches this rank's own heartbeat. If there is no progress for too long, it declares a hang. If the
  store does not respond either, because the process that serves it hangs, this thread reports alone.

Once a hang is declared, every rank that can do so writes the stacks of its threads to a file and publishes its state.
The rank that declared the hang combines them and names the slow rank. The job then continues to wait or ends, as
configured.

A process in which C code holds the GIL runs no Python thread. Python's ``faulthandler`` needs no GIL: it writes that
rank's stacks to its standard error.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ds_trainer.monitor.health.heartbeat import Heartbeat, Limit
from ds_trainer.monitor.health.stacks import (
    OWN_THREADS,
    all_stacks,
    arm,
    collective_frame,
    disarm,
    frame_lines,
    frame_of,
    in_debugger,
    position,
    script_call,
)
from ds_trainer.monitor.health.status_board import StatusBoard
from ds_trainer.monitor.health.stragglers import StragglerReport
from ds_trainer.monitor.health.verdict import RankReport, Verdict, folder_for, judge, summary, write_rank, write_report
from ds_trainer.monitor.health.waits import WaitClock, collective_counts
from ds_trainer.utils.exit_codes import HUNG
from ds_trainer.utils.logging import EVERY_RANK, get_logger
from ds_trainer.utils.outcomes import Blame, host_name, record_blame
from ds_trainer.utils.store import expiry, pause_of, poll
from ds_trainer.utils.threads import new_thread

logger = get_logger("monitor.health")

_BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}  # for the training thread
_OPERATIONS = 6  # of the store at each check of a rank
_LONGEST_ALARM = 1e6  # seconds; faulthandler takes no infinite time
_LEAVING_SECONDS = 1.0  # from the end of the report to that of the process, so that others can read the report


@dataclass(frozen=True)
class WatchdogRules:
    """What counts as a hang, and what happens then.

    Attributes:
        limit: how long a rank may take without progress.
        abort: whether to end the job with exit code 76 after the report.
        poll: seconds between two checks.
        answer: seconds within which a live rank responds.
        on_abort: called on every rank before its process ends, to finish a checkpoint in progress.
        on_abort_seconds: how long that may take.
    """

    limit: Limit
    abort: bool
    poll: float
    answer: float
    on_abort: Callable[[], None] = lambda: None
    on_abort_seconds: float = 60.0

    @classmethod
    def of(cls, limit: Limit, abort: bool, on_abort: Callable[[], None], ranks: int = 1) -> WatchdogRules:
        """Rules with a polling interval of a twentieth of the limit, between 0.1 and 5 seconds; above 1,000 ``ranks``,
        which share one store, longer ones.
        """
        poll = pause_of(_OPERATIONS * ranks, min(5.0, max(0.1, limit.floor / 20)))
        return cls(limit, abort, poll, 2 * poll + 5.0, on_abort)


class Watchdog:
    """Watches one training.

    Args:
        rules: what counts as a hang.
        heartbeat, waits: what the training thread reports, which creates this object.
        directory: where reports go.
        board: shared by all ranks.
        stragglers: exchanges its windows at every check; None: no report on slow ranks.
    """

    def __init__(
        self,
        rules: WatchdogRules,
        heartbeat: Heartbeat,
        waits: WaitClock,
        directory: Path,
        board: StatusBoard,
        stragglers: StragglerReport | None = None,
    ) -> None:
        self.rules, self.heartbeat, self.waits, self.directory = rules, heartbeat, waits, directory
        self._board, self._stragglers = board, stragglers
        self.rank, self.world_size = board.rank, board.world_size
        self._training_thread = threading.get_ident()
        self._stop = threading.Event()
        self._keeper: dict[str, Any] | None = None  # last pulse of rank 0, which holds the store
        self._hangs = 0  # hangs declared so far, by any rank
        self._fired_at: float | None = None  # heartbeat.progress_at of the last hang that this rank reported on
        self._declared = False  # this rank declared a hang, and has made no progress since
        self._reason: str | None = None  # why this rank would declare a hang
        self._exchanged_at = time.monotonic()
        self._neighbor: tuple[Any, float] = (None, self._exchanged_at)
        self._host = host_name()
        self._threads = [new_thread(self._exchange, name=OWN_THREADS[0])]
        if math.isfinite(rules.limit.floor):
            self._threads.append(new_thread(self._watch_self, name=OWN_THREADS[1]))

    def start(self) -> None:
        """Start watching."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching: the training is over."""
        self._stop.set()
        for thread in self._threads:
            thread.join(1.0)  # it may hang in a store that does not respond
        disarm()

    # -- what this rank is doing -----------------------------------------------------------------------------------

    def report(self, ended: bool = False, located: bool = False) -> RankReport:
        """The current state of this rank; with ``located`` also its module, which takes a search."""
        frame = frame_of(self._training_thread)
        stack = frame_lines(frame)
        waiting = self.waits.waiting()
        if waiting is None or waiting[0] in ("send", "recv"):  # of a vote, which consists of messages
            collective = collective_frame(stack)
            if collective is not None:
                waiting = collective, waiting[1] if waiting else self.heartbeat.seconds_in_phase()
        return RankReport(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            step=self.heartbeat.step,
            phase=self.heartbeat.phase,
            seconds=self.heartbeat.seconds_in_phase(),
            seconds_since_progress=self.heartbeat.seconds_since_progress(),
            collective=waiting[0] if waiting else None,
            collective_seconds=waiting[1] if waiting else 0.0,
            counts=collective_counts(),
            stack=stack,
            debugged=in_debugger(frame),
            ended=ended,
            reported_at=time.time(),
            position=position(frame) if located else "",
            script=script_call(frame) if located else "",
        )

    # -- the thread that watches this rank -------------------------------------------------------------------------

    def _watch_self(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        rules, before = self.rules, time.monotonic()
        while not self._stop.wait(rules.poll):
            now = time.monotonic()
            limit = rules.limit.of(self.heartbeat)
            if now - before > max(rules.limit.floor / 2, 4 * rules.poll):
                # Restart all clocks: this whole process was stopped, which is not a hang of the training or its
                # neighbor.
                self.heartbeat.restart_clock()
                self._neighbor = (self._neighbor[0], now)
                self._exchanged_at = now
            before = now
            arm(min(limit + 2 * rules.poll, _LONGEST_ALARM))
            seconds_since_progress = self.heartbeat.seconds_since_progress()
            if self._declared and self._fired_at != self.heartbeat.progress_at:
                self._declared = False
                text = "The job is making progress again, after step %d."
                logger.warning(text, self.heartbeat.step, extra=EVERY_RANK)
            if seconds_since_progress <= limit or self._fired_at == self.heartbeat.progress_at:
                self._reason = None
                continue
            self._reason = (
                f"rank {self.rank} has made no progress for {seconds_since_progress:.1f} s (limit {limit:.1f} s, phase "
                f"'{self.heartbeat.phase}', step {self.heartbeat.step})"
            )
            if now - self._exchanged_at > rules.answer:
                self._report_alone()

    def _report_alone(self) -> None:
        """Report without the store, which does not respond."""
        self._fired_at = self.heartbeat.progress_at
        own = self.report(located=True)
        if own.debugged:
            return
        reason = f"{self._reason}, and the store of the process group does not respond"
        folder = folder_for(self.directory, own.step, f"-of-rank-{self.rank}")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or self.rank == 0:
            verdict = Verdict(
                (), "the process that serves the store, torchrun's agent, is stopped, dead or unreachable"
            )
            text = summary([own], verdict, reason)
        else:
            keeper = self._silent_report(0, self._keeper)
            self._write(folder, keeper)
            text = summary([keeper, own], Verdict((keeper.rank,), "it serves the store"), reason)
            if self.rules.abort and os.environ.get("LOCAL_RANK") == "0":
                self._blame([keeper])
        self._write(folder, own, text)
        self._log_report(text, folder)
        if self.rules.abort:
            self._end()

    # -- the thread that exchanges data with the other ranks ---------------------------------------------------------

    def _exchange(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            while True:
                board = self._board
                board.put(f"pulse/{self.rank}", self.report().to_dict())
                reason = self._reason or self._neighbor_silence()
                if reason is not None and self._fired_at != self.heartbeat.progress_at:
                    own = {
                        "rank": self.rank,
                        "reason": reason,
                        "folder": str(folder_for(self.directory, self.heartbeat.step)),
                    }
                    board.claim(f"hang/{self._hangs + 1}", own)
                hang = board.get(f"hang/{self._hangs + 1}")
                if hang is not None:
                    self._hangs += 1
                    self._join_report(hang)
                if self._stragglers is not None:
                    self._stragglers.exchange(board)
                self._exchanged_at = time.monotonic()
                if self._stop.wait(self.rules.poll):
                    break
            self._board.put(f"pulse/{self.rank}", self.report(ended=True).to_dict())
            self._board.append("ended", self.rank)
            if self._stragglers is not None:
                self._stragglers.finish(self._board)
        except (RuntimeError, OSError) as error:
            # The process that serves the store has ended: utils.failures reports that. The other thread keeps watching.
            logger.debug("rank %d: the store is gone (%s)", self.rank, error)

    def _neighbor_silence(self) -> str | None:
        """The reason to declare a hang if the pulse of the next rank has not changed for too long; else None."""
        if self.world_size == 1:
            return None
        self._keeper = self._board.get("pulse/0")
        neighbor = (self.rank + 1) % self.world_size
        pulse, now = self._board.get(f"pulse/{neighbor}"), time.monotonic()
        if pulse is None or pulse["ended"] or pulse != self._neighbor[0]:
            self._neighbor = (pulse, now)
            return None
        silent = now - self._neighbor[1]
        if silent <= self.rules.limit.of_step(self.heartbeat) + self.rules.answer:
            return None
        self._neighbor = (pulse, now)
        return f"rank {neighbor} has not responded for {silent:.1f} s"

    def _join_report(self, hang: dict[str, Any]) -> None:
        """Contribute to the report of a hang that this rank or another one declared."""
        self._fired_at = self.heartbeat.progress_at
        number, folder, board = self._hangs, Path(hang["folder"]), self._board
        own = self.report(located=True)
        board.put(f"report/{number}/{self.rank}", own.to_dict())
        board.append(f"reported/{number}", self.rank)
        if not own.debugged:
            self._write(folder, own)
        if hang["rank"] == self.rank:
            self._declared = True
            aborts = self._conclude(number, hang["reason"], folder)
            board.put(f"done/{number}", aborts)
        else:
            aborts = self._outcome(number)
        if aborts:
            self._end()
        self._neighbor = (self._neighbor[0], time.monotonic())  # the neighbor published no pulse meanwhile

    def _conclude(self, number: int, reason: str, folder: Path) -> bool:
        """Collect the reports of all ranks, find the slow ones and write the summary. Returns whether to end the
        job.
        """
        reports = self._collect(number)
        in_order = [reports[rank] for rank in sorted(reports)]
        for one in in_order:
            if one.silent:
                self._write(folder, one)
        if any(one.debugged for one in in_order):
            logger.info("No progress, but a rank is in a debugger: this is not a hang.")
            return False
        verdict = judge(in_order)
        text = summary(in_order, verdict, reason)
        self._write(folder, None, text)
        if self.rules.abort:
            self._blame([reports[rank] for rank in verdict.slow])
        self._log_report(text, folder)
        return self.rules.abort

    def _collect(self, number: int) -> dict[int, RankReport]:
        """The reports of all ranks. The number of exchanges with the store depends on those that do not answer only."""
        board, every = self._board, set(range(self.world_size))
        reported: set[int] = set()
        ended: set[int] = set()

        def complete() -> bool:
            reported.update(board.get_list(f"reported/{number}"))
            ended.update(board.get_list("ended"))
            return reported | ended == every

        poll(complete, expiry(self.rules.answer))
        own = {rank: f"report/{number}/{rank}" for rank in reported}
        last = {rank: f"pulse/{rank}" for rank in every - reported}
        texts = {**board.get_some(list(own.values())), **board.get_some(list(last.values()))}
        reports = {rank: RankReport(**texts[key]) for rank, key in own.items()}
        for rank, key in last.items():
            if key in texts and texts[key]["ended"]:
                reports[rank] = RankReport(**texts[key])
            else:
                reports[rank] = self._silent_report(rank, texts.get(key))
        return reports

    def _silent_report(self, rank: int, pulse: dict[str, Any] | None) -> RankReport:
        """The report of a rank that does not respond, from its last pulse; with its process state if it is local."""
        (host, process), state = self._board.member(rank) or ("?", 0), ""
        if host == self._host:
            try:
                state = f"its process is {psutil.Process(process).status()}"
            except psutil.Error:
                state = "its process has ended"
        known = pulse or {"rank": rank, "host": host, "pid": process}
        return RankReport(**{**known, "silent": True, "state": state})

    def _outcome(self, number: int) -> bool:
        """Whether the rank that declared the hang ends the job; without an answer, what is configured."""
        try:
            return bool(self._board.wait(f"done/{number}", 2 * self.rules.answer + 5.0))
        except (RuntimeError, OSError):  # that rank does not answer, or has ended, and the store with it
            return self.rules.abort

    # -- writing the report and ending -----------------------------------------------------------------------------

    def _write(self, folder: Path, report: RankReport | None, text: str | None = None) -> None:
        """Write files to the folder of a hang. A write error is logged, and watching continues."""
        try:
            if report is not None:
                write_rank(folder, report, None if report.rank != self.rank else all_stacks(self._training_thread))
            if text is not None:
                write_report(folder, text)
        except OSError as error:
            logger.error("The report of a hang could not be written to %s: %s", folder, error)

    def _blame(self, slow: list[RankReport]) -> None:
        """Record for the launcher on which machine the others wait, if it is one."""
        if len({one.host for one in slow}) == 1:
            first = slow[0]
            record_blame(Blame(first.rank, first.host, first.sentence()))

    def _log_report(self, text: str, folder: Path) -> None:
        end = f" Ending the job with exit code {HUNG}." if self.rules.abort else ""
        logger.error("%s\nStacks of all ranks: %s.%s", text, folder, end)

    def _end(self) -> None:
        thread = new_thread(self.rules.on_abort, name="ds_trainer-on-abort")
        thread.start()
        thread.join(self.rules.on_abort_seconds)
        time.sleep(_LEAVING_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(HUNG)

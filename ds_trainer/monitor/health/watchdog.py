"""The hang watchdog: notices that a job does not get on, finds out which rank it waits for, leaves stacks behind.

Two threads of each rank, neither of which ever enters a collective:

* One talks to the other ranks over the store of the process group. It leaves a pulse (step, phase, where the training
  thread is) now and then, looks whether the pulse of the next rank changes (a stopped process is found in that way,
  whatever the others are doing), and whether somebody has called out a hang.
* The other one looks at this rank's own heartbeat. Where it stands still for too long, a hang is called out. Where the
  store does not answer either, because it lies in the process that stands still, this thread reports alone.

Once a hang is called out, every rank that can writes the stacks of its threads to a file and says what it is doing; who
has called puts that together, names the slow rank, and the job goes on waiting or is ended, as asked.

A process in which C code holds the interpreter's lock runs no thread of Python. Python's ``faulthandler`` needs no
lock: it writes that rank's stacks to its standard error.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ds_trainer.monitor.health.board import Board
from ds_trainer.monitor.health.heartbeat import Heartbeat, Limit
from ds_trainer.monitor.health.incident import folder_for, summary, write_rank, write_report
from ds_trainer.monitor.health.lock_alarm import put_off, take_off
from ds_trainer.monitor.health.stacks import OWN_THREADS, all_stacks, frame_of, in_debugger, meets_others, places
from ds_trainer.monitor.health.stragglers import StragglerReport
from ds_trainer.monitor.health.verdict import RankReport, Verdict, judge
from ds_trainer.monitor.health.waits import WaitClock, counts
from ds_trainer.utils.exit_codes import HUNG
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.threads import new_thread

logger = get_logger("monitor.health")

_NOT_OURS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}  # they belong to the training thread
_LONGEST_ALARM = 1e6  # seconds; C knows no infinite one
_LEAVING_SECONDS = 1.0  # between the end of the report and that of the process: others read it


@dataclass(frozen=True)
class Rules:
    """What counts as a hang, and what follows.

    Attributes:
        limit: how long a rank may go without progress.
        abort: end the job with exit code 76; otherwise the report is all.
        poll: seconds between two looks.
        answer: seconds within which a live rank answers to a call.
        last_wish: called on every rank before its process ends: to finish a checkpoint under way.
        wish_seconds: how long that may take.
    """

    limit: Limit
    abort: bool
    poll: float
    answer: float
    last_wish: Callable[[], None] = lambda: None
    wish_seconds: float = 60.0

    @classmethod
    def of(cls, limit: Limit, abort: bool, last_wish: Callable[[], None]) -> Rules:
        """With a rhythm that follows from the limit: a look every twentieth of it, but every 5 seconds at least."""
        poll = min(5.0, max(0.1, limit.floor / 20))
        return cls(limit, abort, poll, 2 * poll + 5.0, last_wish)


class Watchdog:
    """Watches one training.

    Args:
        rules: what counts as a hang.
        heartbeat: of the training thread, which makes this object.
        waits: the same.
        directory: where reports go.
        board: on which ranks leave notes.
        stragglers: gets its turn at every look; None: nobody reports on slow ranks.
    """

    def __init__(
        self,
        rules: Rules,
        heartbeat: Heartbeat,
        waits: WaitClock,
        directory: Path,
        board: Board,
        stragglers: StragglerReport | None = None,
    ) -> None:
        self.rules, self.heartbeat, self.waits, self.directory = rules, heartbeat, waits, directory
        self._board, self._stragglers = board, stragglers
        self.rank, self.world_size = board.rank, board.world_size
        self._trained = threading.get_ident()
        self._stop = threading.Event()
        self._keeper: dict[str, Any] | None = None  # last pulse of rank 0, which holds the store
        self._calls = 0  # hangs called out so far, by anybody
        self._fired_at: float | None = None  # heartbeat.progress_at of the last hang that this rank took part in
        self._called = False  # by this rank, and nothing has got on since
        self._reason: str | None = None  # why this rank would call
        self._talked_at = time.monotonic()
        self._neighbour: tuple[Any, float] = (None, self._talked_at)
        self._host = socket.gethostname()
        self._threads = [new_thread(self._talk, name=OWN_THREADS[0])]
        if math.isfinite(rules.limit.floor):
            self._threads.append(new_thread(self._look, name=OWN_THREADS[1]))

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The training is over; nothing is reported any more."""
        self._stop.set()
        for thread in self._threads:
            thread.join(1.0)  # it may be stuck in a store that does not answer
        take_off()

    # -- what this rank is doing -----------------------------------------------------------------------------------

    def report(self, ended: bool = False) -> RankReport:
        """What this rank is doing at this moment."""
        frame = frame_of(self._trained)
        stack = places(frame)
        waiting = self.waits.waiting()
        if waiting is None:
            meets = meets_others(stack)
            waiting = None if meets is None else (meets, self.heartbeat.standing())
        return RankReport(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            step=self.heartbeat.step,
            phase=self.heartbeat.phase,
            seconds=self.heartbeat.standing(),
            stalled=self.heartbeat.stalled(),
            waits_in=waiting[0] if waiting else None,
            waits_for=waiting[1] if waiting else 0.0,
            counts=counts(),
            stack=stack,
            debugged=in_debugger(frame),
            ended=ended,
            said_at=time.time(),
        )

    # -- the thread that looks at this rank ------------------------------------------------------------------------

    def _look(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_OURS)
        rules, before = self.rules, time.monotonic()
        while not self._stop.wait(rules.poll):
            now = time.monotonic()
            limit = rules.limit.of(self.heartbeat)
            if now - before > max(rules.limit.floor / 2, 4 * rules.poll):
                self._forgive(now)
            before = now
            put_off(min(limit + 2 * rules.poll, _LONGEST_ALARM))
            stalled = self.heartbeat.stalled()
            if self._called and self._fired_at != self.heartbeat.progress_at:
                self._called = False
                logger.warning("The job gets on again, after step %d.", self.heartbeat.step)
            if stalled <= limit or self._fired_at == self.heartbeat.progress_at:
                self._reason = None
                continue
            self._reason = (
                f"rank {self.rank} has made no progress for {stalled:.1f} s (limit {limit:.1f} s, phase "
                f"'{self.heartbeat.phase}', step {self.heartbeat.step})"
            )
            if now - self._talked_at > rules.answer:
                self._alone()

    def _forgive(self, now: float) -> None:
        """This whole process stood still: that is no fault of the training's, nor of its neighbour's."""
        self.heartbeat.forgive()
        self._neighbour = (self._neighbour[0], now)
        self._talked_at = now

    def _alone(self) -> None:
        """The store does not answer: say what can be said without it."""
        self._fired_at = self.heartbeat.progress_at
        own = self.report()
        if own.debugged:
            return
        reason = f"{self._reason}, and the store of the process group does not answer"
        folder = folder_for(self.directory, own.step, f"-of-rank-{self.rank}")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or self.rank == 0:
            verdict = Verdict((), "the process that holds the store, torchrun's agent, is stopped, dead or cut off")
            text = summary([own], verdict, reason)
        else:
            keeper = self._silent(0, self._keeper)
            self._write(folder, keeper)
            text = summary([keeper, own], Verdict((keeper.rank,), "it holds the store"), reason)
        self._write(folder, own, text)
        self._say(text, folder)
        if self.rules.abort:
            self._end()

    # -- the thread that talks to the others ------------------------------------------------------------------------

    def _talk(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_OURS)
        try:
            while True:
                self._turn()
                self._talked_at = time.monotonic()
                if self._stop.wait(self.rules.poll):
                    break
            self._board.put(f"pulse/{self.rank}", self.report(ended=True).to_dict())
            if self._stragglers is not None:
                self._stragglers.finish(self._board)
        except (RuntimeError, OSError) as error:
            # The process that holds the store has ended: utils.failures tells of that. This rank's own clock goes on.
            logger.debug("rank %d: no store any more (%s)", self.rank, error)

    def _turn(self) -> None:
        board = self._board
        board.put(f"pulse/{self.rank}", self.report().to_dict())
        reason = self._reason or self._silence()
        if reason is not None and self._fired_at != self.heartbeat.progress_at:
            own = {"rank": self.rank, "reason": reason, "folder": str(folder_for(self.directory, self.heartbeat.step))}
            board.claim(f"call/{self._calls + 1}", own)
        call = board.get(f"call/{self._calls + 1}")
        if call is not None:
            self._calls += 1
            self._answer(call)
        if self._stragglers is not None:
            self._stragglers.exchange(board)

    def _silence(self) -> str | None:
        """Whether the next rank has shown no pulse for too long."""
        if self.world_size == 1:
            return None
        self._keeper = self._board.get("pulse/0")
        neighbour = (self.rank + 1) % self.world_size
        pulse, now = self._board.get(f"pulse/{neighbour}"), time.monotonic()
        if pulse is None or pulse["ended"] or pulse != self._neighbour[0]:
            self._neighbour = (pulse, now)
            return None
        silent = now - self._neighbour[1]
        if silent <= self.rules.limit.of_step(self.heartbeat) + self.rules.answer:
            return None
        self._neighbour = (pulse, now)
        return f"rank {neighbour} has given no sign of life for {silent:.1f} s"

    def _answer(self, call: dict[str, Any]) -> None:
        """A hang was called out, by this rank or another: take part in the report."""
        self._fired_at = self.heartbeat.progress_at
        number, folder, board = self._calls, Path(call["folder"]), self._board
        own = self.report()
        board.put(f"report/{number}/{self.rank}", own.to_dict())
        if not own.debugged:
            self._write(folder, own)
        if call["rank"] == self.rank:
            self._called = True
            aborts = self._conclude(number, call["reason"], folder)
            board.put(f"done/{number}", aborts)
        else:
            aborts = self._outcome(number)
        if aborts:
            self._end()
        self._neighbour = (self._neighbour[0], time.monotonic())  # it had no time for pulses meanwhile

    def _conclude(self, number: int, reason: str, folder: Path) -> bool:
        """Hear all ranks, find the slow one, tell; whether the job is to be ended."""
        reports: dict[int, RankReport] = {}
        deadline = time.monotonic() + self.rules.answer
        while len(reports) < self.world_size and time.monotonic() < deadline:
            for rank in set(range(self.world_size)) - reports.keys():
                said = self._board.get(f"report/{number}/{rank}") or self._last_words(rank, ended=True)
                if said is not None:
                    reports[rank] = RankReport(**said)
            time.sleep(0.05)
        for rank in set(range(self.world_size)) - reports.keys():
            reports[rank] = self._silent(rank, self._last_words(rank))
            self._write(folder, reports[rank])
        in_order = [reports[rank] for rank in sorted(reports)]
        if any(one.debugged for one in in_order):
            logger.info("No progress, but a rank is in a debugger: that is no hang.")
            return False
        text = summary(in_order, judge(in_order), reason)
        self._write(folder, None, text)
        self._say(text, folder)
        return self.rules.abort

    def _silent(self, rank: int, said: dict[str, Any] | None) -> RankReport:
        """A rank that does not answer, by what it said last. On this machine the operating system knows more."""
        (host, process), state = self._board.member(rank) or ("?", 0), ""
        if host == self._host:
            try:
                state = f"its process is {psutil.Process(process).status()}"
            except psutil.Error:
                state = "its process is gone"
        known = said or {"rank": rank, "host": host, "pid": process}
        return RankReport(**{**known, "silent": True, "state": state})

    def _last_words(self, rank: int, ended: bool = False) -> dict[str, Any] | None:
        """The last pulse of a rank; with ``ended`` only if its training is over."""
        pulse: dict[str, Any] | None = self._board.get(f"pulse/{rank}")
        return pulse if pulse is not None and (pulse["ended"] or not ended) else None

    def _outcome(self, number: int) -> bool:
        """What who has called out the hang made of it. Where nobody says: what was asked for."""
        deadline = time.monotonic() + 2 * self.rules.answer + 5.0
        while time.monotonic() < deadline:
            try:
                done = self._board.get(f"done/{number}")
            except (RuntimeError, OSError):
                break  # it has ended, together with the store
            if done is not None:
                return bool(done)
            time.sleep(0.05)
        return self.rules.abort

    # -- what becomes of it ----------------------------------------------------------------------------------------

    def _write(self, folder: Path, report: RankReport | None, text: str | None = None) -> None:
        """Put files into the folder of a hang; a disk that refuses is a reason to say so, not to stop watching."""
        try:
            if report is not None:
                write_rank(folder, report, None if report.rank != self.rank else all_stacks(self._trained))
            if text is not None:
                write_report(folder, text)
        except OSError as error:
            logger.error("The report of a hang could not be written to %s: %s", folder, error)

    def _say(self, text: str, folder: Path) -> None:
        end = f" The job is ended (exit code {HUNG})." if self.rules.abort else ""
        logger.error("%s\nStacks of all ranks: %s.%s", text, folder, end)

    def _end(self) -> None:
        wish = new_thread(self.rules.last_wish, name="ds_trainer-last-wish")
        wish.start()
        wish.join(self.rules.wish_seconds)
        time.sleep(_LEAVING_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(HUNG)

"""When one rank fails, all ranks end within seconds, each with one clear error, instead of hanging.

A rank that raises leaves the others in a collective that it never enters. Checking before every step would cost a wait
for the slowest rank, and forward passes under ZeRO-3 are collectives themselves. So no messages are sent as long as no
rank fails. A rank that fails reports it in the rendezvous store, which is independent of collectives, and waits
briefly:

* All ranks failed (each rejected a setting, for example): each raises its own error, and the process group remains
  usable.
* Only some failed: each of them aborts its process group and raises its own error. The others get a
  :class:`PeerFailure` that names the rank and its error: at once if the broken connection ends their collective (gloo),
  after an abort if it does not (NCCL). A process that is still stuck then ends.
* A rank was killed and reports nothing: the others find out which one it is (:mod:`ds_trainer.utils.roll_call`).

A process that ends with a lost device or connection, its own or that of the rank it failed for, has exit code 74
(:mod:`ds_trainer.utils.exit_codes`), and 1 otherwise.

The cost: a thread of each rank reads the store once a second (with 4,096 ranks every two seconds).

Code that can continue after a failure (the next trial of a search) calls :func:`leave_group` and
:func:`rendezvous_again`: all ranks leave the process group, even in the middle of a collective, and get a store for a
new one.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ds_trainer.utils import distributed
from ds_trainer.utils.errors import text_of
from ds_trainer.utils.exit_codes import DONE, FAILED, FAULT, REQUEUE, STOPPED, code_of
from ds_trainer.utils.outcomes import record_error
from ds_trainer.utils.roll_call import Failure, RollCall
from ds_trainer.utils.store import RankStore, expiry, group_store, pause_of, side_store
from ds_trainer.utils.threads import new_thread
from ds_trainer.utils.torchrun_attempts import record_final

POLL_SECONDS = 1.0
# How long a failed rank waits for the others to fail too; ranks that do the same thing are seldom further apart.
GRACE_SECONDS = 5.0
ABORT_SECONDS = 3.0
ABORT_TAKES_SECONDS = 20.0  # of NCCL; torch itself would wait up to the time limit of a collective
EXIT_SECONDS = 12.0
RECORD_SECONDS = 5.0  # that actions before an exit may take
PATIENT_SECONDS = 120.0  # the same if the failed rank continues, because it breaks the connection itself
RENDEZVOUS_SECONDS = 180.0

_PREFIX = "ds_trainer/failures"
_BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_MAX_TEXT = 4000

P = ParamSpec("P")
R = TypeVar("R")


class PeerFailure(RuntimeError):
    """Another rank failed, so this one cannot continue. The message names that rank and its error.

    Attributes:
        exit_code: how this process ends if nobody catches the exception: like the other rank.
    """

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _Watch:
    """Reports the failure of this rank to the others, and watches for theirs. One per process group."""

    def __init__(self) -> None:
        # Not the connection of the process group, which may be waiting for a rank that is gone.
        self.store = side_store()
        self.notes = RankStore(_PREFIX, self.store)
        _stores.append(group_store())
        self.group: Any = dist.group.WORLD
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._roll = RollCall(self.notes, self.rank, self.world_size, 2 * pause_of(self.world_size, POLL_SECONDS) + 2)
        self._cause: Failure | None = None
        self._seen: tuple[int, Failure | None] = -1, None  # the generation and failure that was read last
        self.generation = 0  # number of failures that all ranks had in common, so every rank counts the same
        self.aborted = False
        self.stuck: str | None = None  # why the process group was not aborted
        self._aborting: threading.Thread | None = None
        self._abort_by = 0.0
        self.lock = threading.Lock()
        new_thread(self._watch_loop, name="ds_trainer-failures").start()

    def _key(self, name: str) -> str:
        return f"{self.generation}/{name}"

    def report(self, error: BaseException, grace: float) -> bool:
        """Report this rank's failure to the others; whether all ranks failed within ``grace`` seconds."""
        if not isinstance(error, PeerFailure):  # otherwise the others would see it instead of its cause
            first = {"rank": self.rank, "error": _described(error)}
            first["exit_code"] = code_of(error) or FAILED  # sys.exit(0) in the middle: the others are not done
            self.notes.set_first(self._key("first"), first)
        try:
            self.notes.add(self._key("count"))
            if self.notes.wait_for_count(self._key("count"), self.world_size, expiry(grace)) < self.world_size:
                return False
        except (RuntimeError, OSError):
            return False  # the rank that holds the store has ended, perhaps with the same error; this one has its own
        self.generation += 1
        return True

    def peer_failure(self, wait: float = 0.0) -> Failure | None:
        """The first failure of another rank that is known within ``wait`` seconds; None without one."""
        place = self._key("first")
        try:
            first = self.notes.wait(place, expiry(wait))
            if self._roll.is_call(first):
                return self._roll.result(place, first["rank"])
        except TimeoutError:
            return None
        except (RuntimeError, OSError) as error:
            # A rank that holds the store and failed has ended now.
            return self._seen[1] if self._seen[0] == self.generation else _without_store(error)
        if first["rank"] == self.rank:
            return None
        self._seen = self.generation, Failure(f"rank {first['rank']} failed with {first['error']}", first["exit_code"])
        return self._seen[1]

    def cause(self, error: BaseException) -> Failure | None:
        """Why a connection of this rank broke with ``error``: what another rank has reported, or that a rank is gone.

        None if ``error`` is the cause, or if this rank has left its process group.
        """
        if self._cause is None:
            self._cause = self.peer_failure(wait=2 * POLL_SECONDS)
        if self._cause is None and not self.aborted:
            try:
                self._roll.call(self._key("first"), _described(error), code_of(error))
            except (RuntimeError, OSError) as gone:
                self._cause = _without_store(gone)
            else:
                self._cause = self.peer_failure(wait=2 * POLL_SECONDS)
        return self._cause

    def abort(self) -> None:
        """Abort the process group on this rank alone; ends collectives of this rank that hang (NCCL).

        Takes at most ``ABORT_TAKES_SECONDS`` and raises nothing: a failed abort is printed, and kept in ``stuck``.
        """
        with self.lock:
            first = not self.aborted and dist.is_initialized() and dist.group.WORLD is self.group
            if first:
                self.aborted = True
                self.stuck = f"the abort did not end within {ABORT_TAKES_SECONDS:.0f} s"
                self._abort_by = time.monotonic() + ABORT_TAKES_SECONDS
                self._aborting = new_thread(self._run_abort, name="ds_trainer-abort")
                self._aborting.start()
        self.await_abort()
        if first and self.stuck is not None:
            _print(f"rank {self.rank} could not abort its process group: {self.stuck}")
        if self.aborted:
            self.group = None  # gloo closes its connections with the last reference to the group

    def await_abort(self) -> None:
        """Wait until the abort has ended or its time is over; returns at once if there is none."""
        if self._aborting is not None:
            self._aborting.join(max(0.0, self._abort_by - time.monotonic()))

    def _run_abort(self) -> None:
        try:
            dist.distributed_c10d._abort_process_group()
        except BaseException as error:
            self.stuck = f"{type(error).__name__}: {error}"
        else:
            self.stuck = None

    def _watch_loop(self) -> None:
        while not self.aborted:
            time.sleep(pause_of(self.world_size, POLL_SECONDS))
            if _depth == 0:
                continue  # outside of a section no rank waits for another
            generation = self.generation
            failure = self.peer_failure()
            if failure is not None and self._still_inside(generation, ABORT_SECONDS):
                if dist.is_initialized() and dist.get_backend() == "nccl":
                    self.abort()
                if self._still_inside(generation, (PATIENT_SECONDS if _surviving else EXIT_SECONDS) - ABORT_SECONDS):
                    _print(f"rank {self.rank} ends: {failure.text}")
                    for action in list(_before_exit):
                        thread = new_thread(action, failure.text, name="ds_trainer-last-record")
                        thread.start()
                        thread.join(RECORD_SECONDS)
                    record_final(failure.exit_code, failure.text)
                    os._exit(failure.exit_code)

    def _still_inside(self, generation: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if _depth == 0 or self.generation != generation:
                return False
            time.sleep(0.1)
        return True


_watch: _Watch | None = None
_stores: list[Any] = []  # kept alive: one of them is the server, which would end with the process group
_surviving = False  # whether failed ranks continue, see survive_failures
_rendezvous = 0
_exit_code = FAILED  # of a process that an exception has ended
_depth = 0  # nesting of the sections that this process is in


def watch_peers() -> None:
    """Start to watch for failures of other ranks, once the process group exists. In a world of one there are none.

    From then on an exception that ends this process gives it the exit code of the table.
    """
    global _watch
    if not getattr(sys.excepthook, "gives_exit_code", False) and not hasattr(sys, "ps1"):
        sys.excepthook = _with_exit_code(sys.excepthook)
    if distributed.world_size() > 1 and (_watch is None or _watch.group is not dist.group.WORLD):
        _watch = _Watch()


def _with_exit_code(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, after which the process ends with the exit code of the exception: ``SystemExit`` in a hook sets it."""

    def gives_exit_code(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _exit_code
        hook(kind, error, trace)
        if _watch is not None and not _watch.aborted and _is_broken_connection(error):  # outside of a section
            try:
                _handle_failure(_watch, error)
            except PeerFailure as failure:
                error = failure
                _print(str(failure).removesuffix("."))
        _exit_code = code_of(error)
        if _exit_code != FAILED:
            raise SystemExit(_exit_code)

    gives_exit_code.gives_exit_code = True  # type: ignore[attr-defined]
    return gives_exit_code


def fails_together(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for a function that all ranks call together: an exception on one rank ends it on all ranks.

    Raises:
        PeerFailure: another rank failed.
    """

    @functools.wraps(function)
    def section(*args: P.args, **kwargs: P.kwargs) -> R:
        global _depth
        _depth += 1
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            if _depth == 1:
                _handle_failure(_watch, error)
            raise
        finally:
            _depth -= 1

    return section


_before_exit: list[Callable[[str], None]] = []


@contextmanager
def before_exit(action: Callable[[str], None]) -> Iterator[None]:
    """For the block: ``action(reason)`` is called, in a thread, before this process is ended for another rank."""
    _before_exit.append(action)
    try:
        yield
    finally:
        _before_exit.remove(action)


def cause_of(error: BaseException) -> str | None:
    """The failure of another rank that has led to ``error``, as text; None if ``error`` is this rank's own."""
    if _watch is None or not (_watch.aborted or _is_broken_connection(error)):
        return None
    failure = _watch.cause(error)
    return None if failure is None else failure.text


@contextmanager
def survive_failures() -> Iterator[None]:
    """For a block in which a failed rank continues: it breaks the connection soon, so the others need not end."""
    global _surviving
    before, _surviving = _surviving, True
    try:
        yield
    finally:
        _surviving = before


def leave_group() -> None:
    """Abort the process group. Connections of gloo end once every reference to it is gone too.

    Raises:
        PeerFailure: the abort failed, so another process group cannot be made.
    """
    if _watch is not None:
        _watch.abort()
        if _watch.stuck is not None:
            raise PeerFailure(f"Rank {_watch.rank} could not abort its process group: {_watch.stuck}.")


def store() -> Any:
    """The store of the process group, even after the group was left; None without :func:`watch_peers`."""
    return None if _watch is None else _watch.store


def end_if_stuck() -> None:
    """Exit at once if the process group could not be aborted, as leaving it would hang; for the end of the process."""
    if _watch is None:
        return
    _watch.await_abort()
    if _watch.stuck is not None:
        _print(f"rank {_watch.rank} ends without leaving its process group")
        sys.stdout.flush()
        os._exit(_exit_code)


def rendezvous_again() -> Any:
    """Wait until all ranks have left the process group; returns a store for a new group. Collective.

    Raises:
        PeerFailure: a rank is missing.
    """
    global _rendezvous
    assert _watch is not None  # a world of one has no peers to fail
    _rendezvous += 1
    name, world_size = f"rendezvous-{_rendezvous}", _watch.world_size
    try:
        _watch.notes.add(name)
        arrived = _watch.notes.wait_for_count(name, world_size, expiry(RENDEZVOUS_SECONDS))
    except (RuntimeError, OSError) as error:
        raise PeerFailure(f"{_without_store(error).text}.", FAULT) from error
    if arrived < world_size:
        raise PeerFailure(f"Only {arrived} of {world_size} ranks came back within {RENDEZVOUS_SECONDS:.0f} s.", FAULT)
    return dist.distributed_c10d.PrefixStore(f"{_PREFIX}/{name}/group", _watch.store)


def _handle_failure(watch: _Watch | None, error: BaseException) -> None:
    """Report ``error``, or raise PeerFailure if another rank caused it."""
    broken = (watch is not None and watch.aborted) or _is_broken_connection(error)
    agreed = isinstance(error, SystemExit) and code_of(error) in (DONE, REQUEUE, STOPPED)  # all ranks stop
    of_another = isinstance(error, PeerFailure) or getattr(error, "failed_rank", None) not in (None, distributed.rank())
    if not agreed and not of_another and not (broken and watch is not None):
        record_error(error)
    if watch is None:
        return
    failure = watch.cause(error) if broken else None
    if failure is not None:
        watch.abort()
        where = "; the traceback is in that rank's output" if failure.reported else ""
        raise PeerFailure(
            f"{failure.text}. Rank {watch.rank} was waiting for it and ends too{where}.", failure.exit_code
        ) from error
    if broken:
        record_error(error)
    if not watch.report(error, POLL_SECONDS if broken else GRACE_SECONDS):
        if isinstance(error, SystemExit) and code_of(error) == DONE:  # alone, and the others end with an error for it
            record_error(error)
            _print(f"rank {watch.rank} has left the training alone with exit code 0; it ends with {FAILED}")
            error.code = FAILED
        watch.abort()


def _without_store(error: Exception) -> Failure:
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = "torchrun's agent" if of_torchrun else "rank 0"
    return Failure(f"{keeper}, which holds the rendezvous store, is gone ({error})", FAULT, False)


def _print(text: str) -> None:
    print(f"ds_trainer: {text}.", file=sys.stderr, flush=True)


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(word in text_of(error) for word in _BROKEN)


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text_of(error)}"[:_MAX_TEXT] + location

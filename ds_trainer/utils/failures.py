"""When one rank fails, all ranks end: with one clear error each, within seconds, instead of waiting for ever.

A rank that raises leaves the others in a collective that it never enters. Asking everybody before every step would cost
a wait for the slowest rank, and forward passes under ZeRO-3 are collectives themselves. So nothing is asked while all
goes well. A rank that fails writes that down in the store which the process group was made with, a channel besides the
collectives, and waits a moment:

* All ranks have failed likewise (a setting that every rank refuses, say): each raises its own error, and the process
  group stays as good as it was.
* Only some have: each of them gives up its process group and raises its own error. The others get a
  :class:`PeerFailure` that names the rank and its error: at once where the broken connection ends their collective
  (gloo), after an abort where it does not (NCCL). What is stuck even then is ended with exit code 1.

A thread of each rank looks into the store once a second; that is all it costs.

Who can begin anew after a failure (the next trial of a search) calls :func:`leave_group` and :func:`meet_again`: all
ranks leave the process group, whatever is half done in it, and get a store for another one.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ds_trainer.utils import distributed
from ds_trainer.utils.side_store import side_store
from ds_trainer.utils.threads import new_thread

POLL_SECONDS = 1.0
# How long a failed rank waits for the others to fail likewise; ranks that do the same thing are seldom further apart.
GRACE_SECONDS = 5.0
ABORT_SECONDS = 3.0
ABORT_TAKES_SECONDS = 20.0  # of NCCL; torch itself would wait for it as long as a collective may take
EXIT_SECONDS = 12.0
PATIENT_SECONDS = 120.0  # the same where the failed rank goes on and breaks the connection itself
MEETING_SECONDS = 180.0

_PREFIX = "ds_trainer/failures"
_BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_MAX_TEXT = 4000

P = ParamSpec("P")
R = TypeVar("R")


class PeerFailure(RuntimeError):
    """Another rank failed, and this one cannot go on without it. The text names the rank and its error."""


class _Watch:
    """Failures of this process group: what this rank tells and hears."""

    def __init__(self) -> None:
        # Not the connection of the process group: that may be busy waiting for a rank that is gone.
        self.store = side_store()
        _stores.append(dist.distributed_c10d._get_default_store())
        self.group: Any = dist.group.WORLD
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.generation = 0  # of failures that all ranks had alike: everybody counts the same
        self.aborted = False
        self.stuck: str | None = None  # why the process group was not aborted
        self._aborting: threading.Thread | None = None
        self._abort_by = 0.0
        self.lock = threading.Lock()
        new_thread(self._look, name="ds_trainer-failures").start()

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self.generation}/{name}"

    def tell(self, error: BaseException, grace: float) -> bool:
        """Tell the others of this rank's own failure; True if all ranks have failed likewise within ``grace`` s."""
        if not isinstance(error, PeerFailure):  # or others would hear of that one instead of its cause
            said = {"rank": self.rank, "error": _described(error)}
            self.store.compare_set(self._key("first"), "", json.dumps(said))
        failed = self.store.add(self._key("count"), 1)
        deadline = time.monotonic() + grace
        while failed < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            failed = self.store.add(self._key("count"), 0)
        if failed < self.world_size:
            return False
        self.generation += 1
        return True

    def heard(self, wait: float = 0.0) -> str | None:
        """What another rank said of its failure."""
        deadline = time.monotonic() + wait
        while True:
            try:
                said = (
                    json.loads(self.store.get(self._key("first"))) if self.store.check([self._key("first")]) else None
                )
            except (RuntimeError, OSError) as error:
                return f"the rank that holds the rendezvous store is gone ({error})"
            if said is not None and said["rank"] != self.rank:
                return f"rank {said['rank']} failed with {said['error']}"
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)

    def give_up(self) -> None:
        """Leave the process group without asking the others; collectives of this rank that hang are ended (NCCL).

        Takes no longer than ``ABORT_TAKES_SECONDS`` and raises nothing: what went wrong is said, and kept in ``stuck``.
        """
        with self.lock:
            first = not self.aborted and dist.is_initialized() and dist.group.WORLD is self.group
            if first:
                self.aborted = True
                self.stuck = f"the abort did not end within {ABORT_TAKES_SECONDS:.0f} s"
                self._abort_by = time.monotonic() + ABORT_TAKES_SECONDS
                self._aborting = new_thread(self._abort, name="ds_trainer-abort")
                self._aborting.start()
        self.await_abort()
        if first and self.stuck is not None:
            _say(f"rank {self.rank} could not abort its process group: {self.stuck}")
        if self.aborted:
            self.group = None  # gloo closes its connections when nobody holds the group any more

    def await_abort(self) -> None:
        """Return when the abort has ended, or its time is over. Without one: at once."""
        if self._aborting is not None:
            self._aborting.join(max(0.0, self._abort_by - time.monotonic()))

    def _abort(self) -> None:
        try:
            dist.distributed_c10d._abort_process_group()
        except BaseException as error:
            self.stuck = f"{type(error).__name__}: {error}"
        else:
            self.stuck = None

    def _look(self) -> None:
        while not self.aborted:
            time.sleep(POLL_SECONDS)
            if _depth == 0:
                continue  # no rank can wait for another outside of a section
            generation = self.generation
            said = self.heard()
            if said is not None and self._still_inside(generation, ABORT_SECONDS):
                if dist.is_initialized() and dist.get_backend() == "nccl":
                    self.give_up()
                if self._still_inside(generation, (PATIENT_SECONDS if _patient else EXIT_SECONDS) - ABORT_SECONDS):
                    _say(f"rank {self.rank} ends: {said}")
                    os._exit(1)

    def _still_inside(self, generation: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if _depth == 0 or self.generation != generation:
                return False
            time.sleep(0.1)
        return True


_watch: _Watch | None = None
_stores: list[Any] = []  # kept: one of them is the server itself, which would end with the process group
_patient = False  # whether failed ranks go on
_meetings = 0
_depth = 0  # sections that this process is in, one inside the other


def watch_peers() -> None:
    """Begin to look out for failures of other ranks; to be called when the process group exists. In one: nothing."""
    global _watch
    if distributed.world_size() > 1 and (_watch is None or _watch.group is not dist.group.WORLD):
        _watch = _Watch()


def fails_together(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of what all ranks do together: an exception on one of them ends it on all of them.

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
            if _watch is not None and _depth == 1:
                _share(_watch, error)
            raise
        finally:
            _depth -= 1

    return section


@contextmanager
def patience() -> Iterator[None]:
    """For a block in which a failed rank goes on: it breaks the connection soon, so that others need not end."""
    global _patient
    before, _patient = _patient, True
    try:
        yield
    finally:
        _patient = before


def leave_group() -> None:
    """Give up the process group. Connections of gloo end when all that held it has been let go too.

    Raises:
        PeerFailure: it could not be aborted, so that another one cannot be made.
    """
    if _watch is not None:
        _watch.give_up()
        if _watch.stuck is not None:
            raise PeerFailure(f"Rank {_watch.rank} could not abort its process group: {_watch.stuck}.")


def store() -> Any:
    """The store of the process group, also when that has been left; None where nobody watched."""
    return None if _watch is None else _watch.store


def end_if_stuck() -> None:
    """When the process ends: end it at once if its process group could not be aborted; leaving it would hang."""
    if _watch is None:
        return
    _watch.await_abort()
    if _watch.stuck is not None:
        _say(f"rank {_watch.rank} ends without leaving its process group")
        sys.stdout.flush()
        os._exit(1)


def meet_again() -> Any:
    """Wait until all ranks have left the process group; a store to make another one with. Collective.

    Raises:
        PeerFailure: not all ranks came.
    """
    global _meetings
    assert _watch is not None  # there were others
    _meetings += 1
    name = f"{_PREFIX}/meeting-{_meetings}"
    came, deadline = 0, time.monotonic() + MEETING_SECONDS
    try:
        came = _watch.store.add(name, 1)
        while came < _watch.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            came = _watch.store.add(name, 0)
    except (RuntimeError, OSError) as error:
        raise PeerFailure(f"the rank that holds the rendezvous store is gone ({error}).") from error
    if came < _watch.world_size:
        raise PeerFailure(f"{came} of {_watch.world_size} ranks came together again after a failure.")
    return dist.distributed_c10d.PrefixStore(f"{name}/group", _watch.store)


def _share(watch: _Watch, error: BaseException) -> None:
    """Settle with the other ranks what ``error`` means; returns where this rank's own error is to be raised."""
    broken = watch.aborted or _is_broken_connection(error)
    if broken:
        said = watch.heard(wait=2 * POLL_SECONDS)
        if said is not None:
            watch.give_up()
            raise PeerFailure(
                f"{said}. Rank {watch.rank} was waiting for it and ends too; its traceback is in that rank's output."
            ) from error
    # A connection that broke without a word is that of a rank which was killed: it will not fail likewise.
    if not watch.tell(error, POLL_SECONDS if broken else GRACE_SECONDS):
        watch.give_up()


def _say(text: str) -> None:
    print(f"ds_trainer: {text}.", file=sys.stderr, flush=True)


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT] + place

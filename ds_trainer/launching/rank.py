"""``python -m ds_trainer.launching.rank [-m] PROGRAM ...``: the wrapper process between a launcher and one rank.

Launchers lose exit codes, leave ranks running when they are killed, and use different variables for the rank. This
small process starts ``python PROGRAM ...`` as its child and

* sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, whatever the launcher
  (:mod:`ds_trainer.utils.ranks`);
* records how the child ended (:mod:`ds_trainer.utils.outcomes`), even if it was killed;
* ends the child when the job has ended: the launcher or ``ds-trainer launch`` has died, the job was aborted (a file),
  or the connection to another machine has closed;
* looks at shared files for its whole machine if its local rank is 0 (:class:`MachineLeader`);
* forwards SIGTERM and SIGUSR1. SIGUSR1 also creates the stop file, so it takes effect before the child has a handler;
* leaves no descendant of the child running.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from ds_trainer.launching.job import ABORT_NAME, ATTEMPT_DIR, CONNECTION, JOB_ID, LAUNCHED_BY, STOP_FILE, is_alive
from ds_trainer.launching.processes import adopt_orphans, end_descendants, prepare_child
from ds_trainer.utils import outcomes
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import CANNOT_WORK, REQUEUE, STOPPED
from ds_trainer.utils.host_memory import kernel_kills, killed_for_memory
from ds_trainer.utils.ranks import RankInfo, likely_rank, resolve_ranks

ENCODED = "--encoded="
POLL_SECONDS = 1.0
KILL_AFTER_SECONDS = 10.0  # between SIGTERM and SIGKILL
PEER_WAIT_SECONDS = 30.0
_LISTING_PAUSES = 0.2, 3.0  # seconds: shortest and longest between two listings of the outcomes
_LISTED_A_SECOND = 1000  # names that a machine lists at most


def main(argv: Sequence[str]) -> int:
    """Run the program in ``argv`` as this rank; returns its exit code, or 128 + N if signal N killed it."""
    try:
        info = resolve_ranks(os.environ)
    except ConfigError as error:
        print(f"ds-trainer (rank {likely_rank(os.environ)}): {error}", file=sys.stderr, flush=True)
        _record(CANNOT_WORK)
        return CANNOT_WORK
    if info.master_port:
        os.environ.update(info.environment())
    adopt_orphans()
    leader, kills = MachineLeader(info), kernel_kills()
    parent = os.getppid()
    child = subprocess.Popen(
        [sys.executable, "-u", *decode_args(argv)], preexec_fn=partial(prepare_child, signal.SIGKILL)
    )
    _forward_signals(child)
    _watch(child, parent, leader)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    end_descendants()
    _record(code, killed_for_memory() if code == 128 + signal.SIGKILL and kernel_kills() > kills else "")
    if code in (REQUEUE, STOPPED):
        _wait_for_others(info, leader)
    return code


class MachineLeader:
    """Selects the wrapper that looks at shared files for its machine: that of local rank 0, while it lives.

    A thousand wrappers would overload a shared file system. The others hold a connection to that wrapper; when it ends,
    they look themselves, so what it has seen is seen by all. Where there is no such connection, every wrapper looks.
    """

    def __init__(self, info: RankInfo) -> None:
        job = f"{os.environ.get(JOB_ID)}/{os.environ.get(ATTEMPT_DIR)}"
        self._address = b"\0ds_trainer/" + hashlib.sha256(job.encode()).hexdigest().encode()  # not a file (Linux)
        self._first = info.local_rank == 0
        self._socket, self._connected = self._new_socket(), False
        if self._first:
            with contextlib.suppress(OSError):  # two machines that are simulated on one
                self._socket.bind(self._address)
                self._socket.listen(info.world_size)

    @property
    def here(self) -> bool:
        """Whether this wrapper looks."""
        if self._first:
            return True
        try:
            if not self._connected:
                self._socket.connect(self._address)
                self._connected = True
            self._socket.recv(1)  # nothing is ever sent
        except BlockingIOError:
            return False
        except OSError:
            pass
        self._socket.close()
        self._socket, self._connected = self._new_socket(), False
        return True

    @staticmethod
    def _new_socket() -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        return made


def encode_args(args: Sequence[str]) -> str:
    """``args`` as one argument that no shell can misinterpret; :func:`decode_args` reverses it."""
    return ENCODED + base64.urlsafe_b64encode(json.dumps(list(args)).encode()).decode()


def decode_args(args: Sequence[str]) -> list[str]:
    """``args``, decoded if :func:`encode_args` has encoded them."""
    if len(args) == 1 and args[0].startswith(ENCODED):
        return [str(arg) for arg in json.loads(base64.urlsafe_b64decode(args[0].removeprefix(ENCODED)))]
    return list(args)


def _forward_signals(child: subprocess.Popen[bytes]) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        stop_file = os.environ.get(STOP_FILE)
        if number == signal.SIGUSR1 and stop_file:
            with outcomes.recording("the request to stop"):
                Path(stop_file).touch()
        if child.poll() is None:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well


def _watch(child: subprocess.Popen[bytes], parent: int, leader: MachineLeader) -> None:
    """Return when the child has ended; end it if the job has ended."""
    poll = select.poll()
    if hasattr(os, "pidfd_open"):
        poll.register(os.pidfd_open(child.pid), select.POLLIN)
    if os.environ.get(CONNECTION):
        for stream in (sys.stdout, sys.stderr):
            poll.register(stream.fileno(), 0)  # reports only that the other end has closed
    reason = ""
    while child.poll() is None:
        events = poll.poll(POLL_SECONDS * 1000)
        lost = any(event & (select.POLLHUP | select.POLLERR) for _, event in events)
        reason = "the connection has closed" if lost and child.poll() is None else _reason_to_end(parent, leader)
        if reason:
            break
    if child.poll() is None:
        if "connection" not in reason:  # otherwise there is no output to write to
            print(f"ds-trainer: rank {likely_rank(os.environ)} is terminated: {reason}.", file=sys.stderr, flush=True)
        child.terminate()
        try:
            child.wait(KILL_AFTER_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _reason_to_end(parent: int, leader: MachineLeader) -> str:
    directory = os.environ.get(ATTEMPT_DIR)
    if os.getppid() != parent:
        return "its launcher has died"
    if not is_alive(os.environ.get(LAUNCHED_BY, "")):
        if directory and os.path.isdir(directory):
            with outcomes.recording("the end of the job"):
                Path(directory, ABORT_NAME).touch()  # for ranks on other machines, which cannot see that
        return "ds-trainer launch has died"
    if directory and leader.here and os.path.exists(os.path.join(directory, ABORT_NAME)):
        return "the job was aborted"
    return ""


def _record(code: int, reason: str = "") -> None:
    if not outcomes.record_outcome(code, reason=reason):
        print(
            f"ds-trainer (rank {likely_rank(os.environ)}): {os.environ[outcomes.VARIABLE]} does not exist on this "
            "machine. Use a directory that all machines share: ds-trainer launch --job-dir DIR.",
            file=sys.stderr,
            flush=True,
        )


def _wait_for_others(info: RankInfo, leader: MachineLeader) -> None:
    """Wait for the outcomes of the other ranks: a launcher ends them as soon as one rank exits with such a code."""
    directory = os.environ.get(outcomes.VARIABLE)
    deadline, pause = time.monotonic() + PEER_WAIT_SECONDS, _LISTING_PAUSES[0]
    while directory and time.monotonic() < deadline:
        if leader.here:
            if not os.path.isdir(directory) or outcomes.count_outcomes(Path(directory)) >= info.world_size:
                return
            pause = min(1.5 * pause, max(_LISTING_PAUSES[0], info.world_size / _LISTED_A_SECOND), _LISTING_PAUSES[1])
        time.sleep(pause)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

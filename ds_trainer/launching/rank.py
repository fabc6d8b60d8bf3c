"""``python -m ds_trainer.launching.rank [-m] PROGRAM ...``: stands between a launcher and one rank.

Launchers flatten exit codes, leave ranks behind when they are killed, and do not all say in the same words which rank a
process is. This small process starts ``python PROGRAM ...`` as its child and

* gives it RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, whichever launcher it was
  (:mod:`ds_trainer.utils.ranks`);
* writes down how it ended (:mod:`ds_trainer.utils.outcomes`), also where it was killed;
* ends it when the job is gone: the launcher or ``ds-trainer launch`` has died, the job was given up (a file), or the
  connection to another machine has closed;
* hands SIGTERM and SIGUSR1 on. SIGUSR1 also makes the stop file, so that it counts before the child can hear it;
* leaves no process of the child behind.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ds_trainer.launching.job import ABORT_NAME, ATTEMPT_DIR, CONNECTION, LAUNCHED_BY, STOP_FILE, is_alive
from ds_trainer.launching.processes import die_with_parent, end_descendants, ignore_user_signal, keep_orphans
from ds_trainer.utils import outcomes
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import CANNOT_WORK, REQUEUE, STOPPED
from ds_trainer.utils.ranks import RankInfo, likely_rank, resolve_ranks

ENCODED = "--encoded="
LOOK_SECONDS = 1.0
END_SECONDS = 10.0  # between SIGTERM and SIGKILL
TOGETHER_SECONDS = 30.0


def main(words: Sequence[str]) -> int:
    """Run the program of ``words`` as this rank; gives its exit code, 128 + N where signal N killed it."""
    try:
        info = resolve_ranks(os.environ)
    except ConfigError as error:
        print(f"ds-trainer (rank {likely_rank(os.environ)}): {error}", file=sys.stderr, flush=True)
        _record(CANNOT_WORK)
        return CANNOT_WORK
    if info.master_port:
        os.environ.update(info.environment())
    keep_orphans()
    parent = os.getppid()
    child = subprocess.Popen([sys.executable, "-u", *decoded(words)], preexec_fn=_prepare_child)
    _hand_signals_on(child)
    _watch(child, parent)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    end_descendants()
    _record(code)
    if code in (REQUEUE, STOPPED):
        _wait_for_others(info)
    return code


def encoded(words: Sequence[str]) -> str:
    """One word for many, which no shell on the way can misread; :func:`decoded` gives them back."""
    return ENCODED + base64.urlsafe_b64encode(json.dumps(list(words)).encode()).decode()


def decoded(words: Sequence[str]) -> list[str]:
    """The words that were given, or those that :func:`encoded` made one of."""
    if len(words) == 1 and words[0].startswith(ENCODED):
        return [str(word) for word in json.loads(base64.urlsafe_b64decode(words[0].removeprefix(ENCODED)))]
    return list(words)


def _prepare_child() -> None:
    ignore_user_signal()  # until the program has a handler, which replaces this; it would kill it
    die_with_parent(signal.SIGKILL)


def _hand_signals_on(child: subprocess.Popen[bytes]) -> None:
    def hand_on(number: int, frame: FrameType | None) -> None:
        stop_file = os.environ.get(STOP_FILE)
        if number == signal.SIGUSR1 and stop_file:
            Path(stop_file).touch()
        if child.poll() is None:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, hand_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal gives it to the child too


def _watch(child: subprocess.Popen[bytes], parent: int) -> None:
    """Return when the child has ended; end it when nobody waits for it any more."""
    poll = select.poll()
    if hasattr(os, "pidfd_open"):
        poll.register(os.pidfd_open(child.pid), select.POLLIN)
    if os.environ.get(CONNECTION):
        for stream in (sys.stdout, sys.stderr):
            poll.register(stream.fileno(), 0)  # nothing but that the other end is gone
    gone = ""
    while child.poll() is None:
        events = poll.poll(LOOK_SECONDS * 1000)
        lost = any(event & (select.POLLHUP | select.POLLERR) for _, event in events)
        gone = "the connection has closed" if lost and child.poll() is None else _reason_to_end(parent)
        if gone:
            break
    if child.poll() is None:
        if "connection" not in gone:  # else nobody would hear it
            print(f"ds-trainer: rank {likely_rank(os.environ)} is ended: {gone}.", file=sys.stderr, flush=True)
        child.terminate()
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _reason_to_end(parent: int) -> str:
    directory = os.environ.get(ATTEMPT_DIR)
    if os.getppid() != parent:
        return "its launcher has died"
    if not is_alive(os.environ.get(LAUNCHED_BY, "")):
        if directory and os.path.isdir(directory):
            Path(directory, ABORT_NAME).touch()  # ranks on other machines cannot see it
        return "ds-trainer launch has died"
    if directory and os.path.exists(os.path.join(directory, ABORT_NAME)):
        return "the job was given up"
    return ""


def _record(code: int) -> None:
    if not outcomes.record_outcome(code):
        print(
            f"ds-trainer (rank {likely_rank(os.environ)}): {os.environ[outcomes.VARIABLE]} does not exist on this "
            "machine. Name a folder that all machines see: ds-trainer launch --job-dir DIR.",
            file=sys.stderr,
            flush=True,
        )


def _wait_for_others(info: RankInfo) -> None:
    """A launcher ends all other ranks when one of them ends with such a code: let them come to their own end first."""
    directory = os.environ.get(outcomes.VARIABLE)
    deadline = time.monotonic() + TOGETHER_SECONDS
    while directory and time.monotonic() < deadline:
        if not os.path.isdir(directory) or len(outcomes.read_outcomes(Path(directory))) >= info.world_size:
            return
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The Python stacks of this process's threads, as text; an alarm that writes them while no Python runs."""

from __future__ import annotations

import faulthandler
import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

from torch import nn

_DEBUGGERS = ("bdb.py", "pdb.py")
_DEBUGGER_FOLDERS = ("debugpy", "pydevd")
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
OWN_THREADS = ("ds_trainer-health", "ds_trainer-watchdog")
"""Threads of the watchdog itself, which are left out."""
_PACKAGE = str(Path(__file__).parents[2])
_TRAINING = str(Path(_PACKAGE, "training", ""))
# Files in which ranks wait for each other, with or without a collective.
_WAITING_FILES = ("torch/distributed/", "deepspeed/comm/", "ds_trainer/utils/distributed.py")
_NEAR = 8  # innermost frames that are searched


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of the thread with this identifier."""
    return sys._current_frames().get(thread)


def frame_lines(frame: FrameType | None, most: int = 40) -> list[str]:
    """The innermost ``most`` frames as ``file:line in function``, outermost first. Reads no source file."""
    lines: list[str] = []
    while frame is not None and len(lines) < most:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]


def user_frame(stack: list[str]) -> str | None:
    """The innermost of :func:`frame_lines` that belongs neither to a library nor to this package."""
    users = [frame for frame in stack if not frame.startswith((*_LIBRARIES, _PACKAGE, "<"))]
    return users[-1] if users else None


def collective_frame(stack: list[str]) -> str | None:
    """The function in which the thread of :func:`frame_lines` waits for other ranks; None if it does not."""
    near = [frame for frame in stack[-_NEAR:] if any(path in frame for path in _WAITING_FILES)]
    # The outermost one has the name that people know: all_reduce, not the decorators around it.
    return near[0].rpartition(" in ")[2] if near else None


def position(frame: FrameType | None) -> str:
    """The innermost module whose code this thread runs, by its name in the outermost one, and the micro-batch.

    Empty if it runs none, such as while it loads data. Called for reports only: it searches the modules.
    """
    modules: list[nn.Module] = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            modules.append(owner)
        frame = frame.f_back
    if not modules:
        return ""
    root = modules[-1]
    names = {module: name for name, module in root.named_modules()}
    where = next((names[module].removeprefix("module.") for module in modules if names.get(module)), "")
    if where == "module":
        where = "the model"
    done = getattr(root, "micro_steps", None)  # of DeepSpeed's engine
    if done is None:
        return where
    batch = f"micro-batch {done % root.gradient_accumulation_steps() + 1}"  # type: ignore[operator]
    return f"{where} of {batch}" if where else batch


def script_call(frame: FrameType | None) -> str:
    """The callback or method of a script that a training has called, and the line of the script that runs in it.

    Empty if there is none: a model of a script runs on all ranks.
    """
    own: list[FrameType] = []  # innermost first
    called = False  # by this package
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            called = bool(own)
            if called and path.startswith(_TRAINING):
                break
        elif not called and not path.startswith((*_LIBRARIES, "<")):
            own.append(frame)
        frame = frame.f_back
    if frame is None or not own or isinstance(owner := own[-1].f_locals.get("self"), nn.Module):
        return ""
    name = own[-1].f_code.co_name if owner is None else f"{type(owner).__name__}.{own[-1].f_code.co_name}"
    return f"{name} ({own[0].f_code.co_filename}:{own[0].f_lineno})"


def in_debugger(frame: FrameType | None) -> bool:
    """Whether this thread is stopped in a debugger."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.name in _DEBUGGERS or any(part.startswith(_DEBUGGER_FOLDERS) for part in path.parts):
            return True
        frame = frame.f_back
    return False


def all_stacks(first: int) -> str:
    """The stacks of all threads with their source lines; the thread ``first`` comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    order = sorted((one for one in frames if names.get(one) not in OWN_THREADS), key=lambda one: one != first)
    return "\n".join(
        f"Thread {names.get(ident, 'without a name')!r}, innermost call last:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in order
    )


# An alarm for a process in which C code holds the GIL, so that no Python thread runs.
#
# Python's ``faulthandler`` waits in a C thread and needs no GIL: unless the alarm is rearmed in time, it writes the
# stacks of all threads to standard error. A process has one such alarm: if a program calls
# ``faulthandler.dump_traceback_later`` too, the later call wins.
#
# A process that is forked while the alarm is armed hangs at its exit (CPython 3.11: it waits for a thread that it does
# not have). So the alarm is disarmed during every fork.

_STANDARD_ERROR = 2
_lock = threading.Lock()
_armed = False
_watches_forks = False


def arm(seconds: float) -> None:
    """Write all stacks to standard error in ``seconds``, unless this is called again before then."""
    global _armed, _watches_forks
    with _lock:
        if not _watches_forks:
            os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release)
            _watches_forks = True
        faulthandler.dump_traceback_later(seconds, file=_STANDARD_ERROR)
        _armed = True


def disarm() -> None:
    """Cancel the alarm."""
    with _lock:
        _cancel()


def _cancel() -> None:
    global _armed
    if _armed:
        faulthandler.cancel_dump_traceback_later()
        _armed = False


def _before_fork() -> None:
    _lock.acquire()  # released on both sides, so that no thread arms it in between
    _cancel()

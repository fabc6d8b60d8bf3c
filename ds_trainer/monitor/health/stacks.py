"""What the threads of this process are doing: their Python stacks, as text."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

_DEBUGGERS = ("bdb.py", "pdb.py")
_DEBUGGER_FOLDERS = ("debugpy", "pydevd")
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
OWN_THREADS = ("ds_trainer-health", "ds_trainer-watchdog")
"""Those of the watchdog itself, which nobody asks about."""
_PACKAGE = str(Path(__file__).parents[2])
# Where ranks wait for each other, also without a collective.
_MEETING_PLACES = ("torch/distributed/", "deepspeed/comm/", "ds_trainer/utils/distributed.py")
_NEAR = 8  # frames from the innermost one; deeper ones have only called what is being done


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of the thread with this identity."""
    return sys._current_frames().get(thread)


def places(frame: FrameType | None, most: int = 40) -> list[str]:
    """The innermost ``most`` frames as ``file:line in function``, outermost first. Reads no source file."""
    found: list[str] = []
    while frame is not None and len(found) < most:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


def place_of_user(stack: list[str]) -> str | None:
    """The innermost of :func:`places` that belongs neither to a library nor to this package."""
    own = [place for place in stack if not place.startswith((*_LIBRARIES, _PACKAGE, "<"))]
    return own[-1] if own else None


def meets_others(stack: list[str]) -> str | None:
    """The function in which the thread of :func:`places` meets other ranks; None where it does not."""
    near = [place for place in stack[-_NEAR:] if any(folder in place for folder in _MEETING_PLACES)]
    # The first one from outside has the name that people know: all_reduce, not the decorators around it.
    return near[0].rpartition(" in ")[2] if near else None


def in_debugger(frame: FrameType | None) -> bool:
    """Whether a person is looking at this thread in a debugger."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.name in _DEBUGGERS or any(part.startswith(_DEBUGGER_FOLDERS) for part in path.parts):
            return True
        frame = frame.f_back
    return False


def all_stacks(first: int) -> str:
    """The stacks of all threads with their source lines; that of the thread ``first`` comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    order = sorted((one for one in frames if names.get(one) not in OWN_THREADS), key=lambda one: one != first)
    return "\n".join(
        f"Thread {names.get(ident, 'without a name')!r}, innermost call last:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in order
    )

"""``in_a_fork``: calls a function in a process that has imported everything and has no process group."""

from __future__ import annotations

import multiprocessing
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.support.pool import _PRELOADED


def in_a_fork(function: Any, *args: Any) -> Any:
    """``function(*args)`` in a process of its own, which cannot keep what it changes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_answer, args=(child_end, function, args), daemon=True)
    process.start()
    child_end.close()
    try:
        assert parent_end.poll(600), "no answer"
        good, value = parent_end.recv()
    finally:
        process.kill()
        process.join()
    assert good, value
    return value


def _answer(pipe: Connection, function: Any, args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))

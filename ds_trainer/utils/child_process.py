"""Calls a function in a process of its own, which changes nothing in this one."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from ds_trainer.utils.errors import ConfigError


class ChildFailed(RuntimeError):
    """The function raised anything but a ConfigError, or its process ended. The message has its traceback."""


def in_child_process(
    function: Callable[..., Any], *args: Any, environment: Mapping[str, str | None] | None = None
) -> Any:
    """Return ``function(*args)``, called in a new interpreter.

    Args:
        function: defined at the top of a module; it, its arguments and its result can be pickled.
        args: its arguments.
        environment: variables that the process has before it imports anything; None removes one.

    Raises:
        ConfigError: the function raised it.
        ChildFailed: it raised something else, or its process was ended.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    call = pickle.dumps((function, args))
    process = context.Process(target=_serve, args=(there, dict(environment or {}), call), daemon=False)
    process.start()
    there.close()
    try:
        good, value = here.recv()
    except EOFError:
        process.join()
        raise ChildFailed(f"the process ended with exit code {process.exitcode}") from None
    except BaseException:  # an interrupt: the child is of no use anymore
        process.terminate()
        raise
    finally:
        process.join()
        here.close()
    if good:
        return value
    raise value if isinstance(value, ConfigError) else ChildFailed(value)


def _serve(connection: Connection, environment: Mapping[str, str | None], call: bytes) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        function, args = pickle.loads(call)
        answer = (True, function(*args))
    except ConfigError as error:
        answer = (False, error)
    except Exception:
        answer = (False, traceback.format_exc())
    connection.send(answer)

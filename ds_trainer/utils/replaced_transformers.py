"""What is different in a process where classes of this package stand in place of those of transformers.

Code written for transformers finds the process group and accelerate's ``PartialState`` as soon as it has made
``TrainingArguments``, and accelerate's ``AcceleratorState`` after it has made a Trainer. This package creates them
later, so that all errors are reported before a process group exists. Here it does as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_join: Callable[[Any], None] | None = None


def set_replaced(join: Callable[[Any], None]) -> None:
    """Note that this process is such a one.

    Args:
        join: starts the process group for training arguments.
    """
    global _join
    _join = join


def is_replaced() -> bool:
    """Whether this process is such a one."""
    return _join is not None


def arguments_made(args: Any) -> None:
    """Start the process group for new training arguments, in such a process. Collective then."""
    if _join is not None:
        _join(args)


@contextmanager
def arguments_are_no_start() -> Iterator[None]:
    """Inside, new training arguments start no process group: they only check values."""
    global _join
    join, _join = _join, None
    try:
        yield
    finally:
        _join = join

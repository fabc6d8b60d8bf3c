"""Text for a terminal: that of others without the characters that control one, and output that cannot be written."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ds_trainer.utils.secrets import redacted

# Controls without tab and line feed, marks that change the direction of text, separators of lines, surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    r"""``text`` with escapes (``\\x1b``) in place of control characters other than tabs and line feeds."""
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)


def shown(text: str) -> str:
    """``text`` for a terminal or a log: :func:`printable`, without secrets."""
    return printable(redacted(text))


_lost = False


def say(text: str, write: Callable[[str], Any] = print) -> None:
    """Print a line of a run, which outlives its output: a full disk or a closed pipe costs the line and one warning."""
    global _lost
    try:
        write(text)
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it is closed, or does not have these characters
        if not _lost:
            from ds_trainer.utils.logging import get_logger

            _lost = True
            atexit.register(_end_lost_output)
            get_logger(__name__).warning("The run continues, but its output cannot be written: %s", error)


def _end_lost_output() -> None:
    """Keep what could not be written from making the exit code of the process 120."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: str) -> str:
    """:func:`printable` with escapes also for tabs and line feeds."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")

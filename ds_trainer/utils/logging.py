"""The package's loggers, below ``ds_trainer``. What all ranks have to say alike is said by rank 0 alone.

A rank other than 0 logs errors, and the warnings that concern it or its machine: ``extra=EVERY_RANK``. This holds
before there is a process group, with any launcher, and however the user has configured logging.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.exit_codes import code_of
from ds_trainer.utils.printable import shown
from ds_trainer.utils.ranks import likely_rank
from ds_trainer.utils.torchrun_attempts import record_final

_ROOT = "ds_trainer"
CHECK = "ds_trainer_check"
"""Attribute of a record with the result of a check, for the report of the run: ``extra={CHECK: "self-test"}``."""
EVERY_RANK = {"every_rank": True}
"""``extra`` of a warning of one rank or machine: data of its worker, a disk of its machine, memory of its GPU."""


MAIN_FIRST_SECONDS = 3.0
"""How long other ranks wait with an error that the main process has too: launchers end all ranks when one fails."""
_PACKAGE = str(Path(__file__).parents[1])


class _FirstRank(logging.Filter):
    """Drops what ranks other than 0 repeat: information and warnings.

    Attributes:
        all_messages: whether the user has asked for the messages of this rank.
    """

    all_messages = False

    def filter(self, record: logging.LogRecord) -> bool:
        repeated = logging.INFO <= record.levelno < logging.ERROR and not getattr(record, "every_rank", False)
        return self.all_messages or not repeated or likely_rank(os.environ) == 0


class _Shown(logging.Filter):
    """Cleans messages of secrets and control characters."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        clean = shown(message)
        if clean != message:
            record.msg, record.args = clean, None
        if record.exc_info and not record.exc_text:  # formatters use this text unchanged
            record.exc_text = shown(logging.Formatter().formatException(record.exc_info))
        return True


_first_rank, _shown = _FirstRank(), _Shown()


def get_logger(name: str = _ROOT) -> logging.Logger:
    """A logger below ``ds_trainer``, whose information and warnings come from rank 0, or have ``extra=EVERY_RANK``.

    A handler is attached once, and not if the user has configured logging.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if likely_rank(os.environ) == 0 else logging.WARNING)
        root.propagate = False
    logger = logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
    logger.addFilter(_first_rank)  # does nothing twice
    logger.addFilter(_shown)
    return logger


def set_log_level(level: int, all_messages: bool) -> None:
    """Set the level of the package's loggers, and whether this rank logs what rank 0 logs as well."""
    get_logger().setLevel(level)
    _first_rank.all_messages = all_messages


def warn(text: str, category: type[Warning], stacklevel: int = 1) -> None:
    """``warnings.warn`` that only rank 0 shows. A filter that makes it an error does so on every rank."""
    with nullcontext() if likely_rank(os.environ) == 0 else warnings.catch_warnings(record=True):
        warnings.warn(text, category, stacklevel=stacklevel + 1)


def hide_in_logs(*prefixes: str) -> None:
    """Clean the messages of existing loggers of other libraries whose names begin with one of ``prefixes``."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in prefixes:
            logging.getLogger(name).addFilter(_shown)  # does nothing twice


def one_error_per_job() -> None:
    """From now on a ConfigError that ends this process is printed once per job, with the lines of the script alone.

    A second call does nothing, and neither does one in an interactive session.
    """
    if not getattr(sys.excepthook, "once_per_job", False) and not hasattr(sys, "ps1"):
        sys.excepthook = _once_per_job(sys.excepthook)


def _once_per_job(hook: Callable[..., Any]) -> Callable[..., Any]:
    def print_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ConfigError):
            error.__cause__, error.__suppress_context__ = None, True
            trace = _of_script(trace)
            error.with_traceback(trace)
            if likely_rank(os.environ) != 0:
                record_final(code_of(error), f"{kind.__name__}: {error}")
                time.sleep(MAIN_FIRST_SECONDS)
        hook(kind, error, trace)

    print_once.once_per_job = True  # type: ignore[attr-defined]
    return print_once


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without the frames below the last one that is not of this package."""
    if trace is None:
        return None
    below = _of_script(trace.tb_next)
    if below is None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    return TracebackType(below, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)

"""The package's loggers, below ``ds_trainer``; on ranks other than 0 the level is WARNING."""

from __future__ import annotations

import logging
import os

from ds_trainer.utils.ranks import likely_rank

_ROOT = "ds_trainer"
CHECK = "ds_trainer_check"
"""Attribute of a record with the result of a check, for the report of the run: ``extra={CHECK: "self-test"}``."""


def get_logger(name: str = _ROOT) -> logging.Logger:
    """A logger below ``ds_trainer``; messages of level INFO appear on the main process only.

    A handler is attached once, and not if the user has configured logging.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if likely_rank(os.environ) == 0 else logging.WARNING)
        root.propagate = False
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")

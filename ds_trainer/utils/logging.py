"""The project's loggers: one root (``ds_trainer``), silent on ranks that should not speak."""

from __future__ import annotations

import logging
import os

from ds_trainer.utils.ranks import likely_rank

_ROOT = "ds_trainer"


def get_logger(name: str = _ROOT) -> logging.Logger:
    """A logger below ``ds_trainer``; messages of level INFO appear on the main process only.

    Handlers are attached once, so that a library user who configured logging keeps his own format.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO if likely_rank(os.environ) == 0 else logging.WARNING)
        root.propagate = False
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")

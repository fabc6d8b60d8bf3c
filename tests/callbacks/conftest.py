"""The records of the project's loggers, however logging was configured before."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


class LogRecords(logging.Handler):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname} {record.getMessage()}")

    @property
    def text(self) -> str:
        return "\n".join(self.messages)


@pytest.fixture
def log() -> Iterator[LogRecords]:
    handler, logger = LogRecords(), logging.getLogger("ds_trainer")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)

"""What the project's loggers say, whoever configured logging before."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


class Heard(logging.Handler):
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
def log() -> Iterator[Heard]:
    heard, logger = Heard(), logging.getLogger("ds_trainer")
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    yield heard
    logger.removeHandler(heard)
    logger.setLevel(level)

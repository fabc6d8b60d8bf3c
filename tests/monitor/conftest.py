"""The records of the project's loggers, however logging was configured before."""

from tests.callbacks.conftest import LogRecords, log

__all__ = ["LogRecords", "log"]

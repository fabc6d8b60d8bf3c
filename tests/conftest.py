"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.pool import close_pools

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Deadlines measure the machine, not the code.
settings.register_profile("ds_trainer", deadline=None, max_examples=60)
settings.load_profile("ds_trainer")


@pytest.fixture(scope="session", autouse=True)
def _close_worker_pools() -> Iterator[None]:
    """Ranks started for this session end with it."""
    yield
    close_pools()

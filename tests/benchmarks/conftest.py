from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds_trainer.engine.process_group import stop_process_group


@pytest.fixture(scope="module", autouse=True)
def _leave_the_process_group() -> Iterator[None]:
    """The trainers of this process have made one; tests that come later ask whether there is any."""
    yield
    stop_process_group()

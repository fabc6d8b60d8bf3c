"""Settings of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _machine_with_libaio(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that counts all problems of a configuration gets the same count on a machine without ``libaio.h``."""
    headers = tmp_path_factory.getbasetemp() / "headers"
    headers.mkdir(exist_ok=True)
    Path(headers, "libaio.h").touch()
    monkeypatch.setenv("C_INCLUDE_PATH", str(headers))

"""A Hub on this machine for every test of this folder, and no waiting between attempts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds_trainer.training.hub import client
from tests.support.hub_server import HubServer, pointed_at


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(client, "WAITS", (0.01, 0.01))
    with HubServer() as server, pointed_at(server.url):
        yield server

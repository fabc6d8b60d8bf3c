"""Long jobs begin with the first test of this folder, so that the others fill the time in which they wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.machines import Cluster, why_not
from tests.cluster.scenarios import NODES, Scenario, start_scenarios


@pytest.fixture(scope="session")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scenario]]:
    """Jobs that something stops in the middle, by name."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no cluster inside this machine: {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), NODES)
    yield start_scenarios(cluster, tmp_path_factory.mktemp("stories"))
    cluster.close()


@pytest.fixture(scope="session", autouse=True)
def _start_scenarios_early(request: pytest.FixtureRequest) -> None:
    if why_not() is None and any("scenarios" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("scenarios")

"""Long jobs begin with the first test of this folder, so that the others fill the time in which they wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.machines import Cluster, why_not
from tests.cluster.stories import NODES, Story, begin_stories


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Story]]:
    """Jobs that something stops in the middle, by name."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no cluster inside this machine: {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), NODES)
    yield begin_stories(cluster, tmp_path_factory.mktemp("stories"))
    cluster.close()


@pytest.fixture(scope="session", autouse=True)
def _begin_stories_early(request: pytest.FixtureRequest) -> None:
    if why_not() is None and any("stories" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("stories")

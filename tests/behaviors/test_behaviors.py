"""Each behavior gives the same with transformers' classes and with ours, or is listed as a difference."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ds_trainer
from tests.behaviors.differences import DIFFERENCES
from tests.behaviors.runner import Behavior, all_behaviors, difference, leave_processes, outcome
from tests.support.transformers_version import needs_the_reference

BEHAVIORS = all_behaviors()
Shared = dict[Any, Any]


@pytest.fixture(scope="module")
def shared() -> Shared:
    """Trainings that several behaviors read."""
    return {}


@pytest.fixture(scope="module")
def references(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared: Shared
) -> Iterator[dict[str, Any]]:
    """What the selected behaviors give with transformers; found first, in a process without a process group."""
    import transformers

    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    selected = [call.params["behavior"] for call in calls if call is not None]
    directory = tmp_path_factory.mktemp("transformers")
    assert transformers.Trainer is not ds_trainer.Trainer
    gc.freeze()  # both have been imported; transformers collects garbage in every training
    leave_processes()
    found = {one.name: outcome(one, transformers, directory / one.name, shared) for one in selected}
    leave_processes()
    yield found
    leave_processes()
    gc.unfreeze()


@pytest.mark.cases(27, rest="extended")
@needs_the_reference
@pytest.mark.parametrize("behavior", BEHAVIORS, ids=lambda behavior: behavior.name)
def test_behavior(behavior: Behavior, tmp_path: Path, references: dict[str, Any], shared: Shared) -> None:
    ours = outcome(behavior, ds_trainer, tmp_path / "ours", shared)
    found = difference(ours, references[behavior.name])
    if behavior.name in DIFFERENCES:
        assert found is not None, "no longer differs: remove it from DIFFERENCES"
    else:
        assert found is None, found


def test_every_listed_difference_is_a_behavior_and_has_a_reason() -> None:
    assert set(DIFFERENCES) <= {behavior.name for behavior in BEHAVIORS}
    assert all(reason.endswith(".") for reason in DIFFERENCES.values())

from __future__ import annotations

import os
import sys

import pytest

from ds_trainer.cli.dry_run import ChildFailed, in_child_process
from ds_trainer.utils.errors import ConfigError


def environment_of(name: str) -> tuple[str | None, int, bool]:
    return os.environ.get(name), os.getpid(), "torch" in sys.modules


def refuse() -> None:
    raise ConfigError(["first", "second"])


def divide(number: int) -> float:
    return number / 0


def test_a_function_runs_in_another_process_with_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD_REMOVES", "here")
    value, process, has_torch = in_child_process(environment_of, "CHILD_HAS", environment={"CHILD_HAS": "there"})
    assert value == "there"
    assert process != os.getpid()
    assert not has_torch
    assert "CHILD_HAS" not in os.environ
    assert in_child_process(environment_of, "CHILD_REMOVES", environment={"CHILD_REMOVES": None})[0] is None
    assert os.environ["CHILD_REMOVES"] == "here"


def test_a_config_error_is_raised_with_its_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        in_child_process(refuse)
    assert caught.value.problems == ["first", "second"]


def test_another_error_has_its_traceback() -> None:
    with pytest.raises(ChildFailed, match="ZeroDivisionError"):
        in_child_process(divide, 1)


def test_the_end_of_the_process_is_an_error() -> None:
    with pytest.raises(ChildFailed, match="exit code 7"):
        in_child_process(os._exit, 7)

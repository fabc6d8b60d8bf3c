"""``Problems``: one collector for everything that is wrong, one error at the end."""

from __future__ import annotations

import pytest

from ds_trainer.utils.errors import ConfigError, Problems


def test_all_problems_in_one_error_in_their_order() -> None:
    problems = Problems(["b=1 is wrong."])
    problems.add("a=2 is wrong.")
    problems.extend(["c=3 is wrong.", "d=4 is wrong."])
    with pytest.raises(ConfigError) as error:
        problems.raise_if_any()
    assert error.value.problems == ["b=1 is wrong.", "a=2 is wrong.", "c=3 is wrong.", "d=4 is wrong."]
    assert "4 problems:\n  1. b=1 is wrong.\n" in str(error.value)


def test_a_problem_that_two_checks_find_is_listed_once() -> None:
    problems = Problems()
    for _ in range(2):
        problems.add("a=2 is wrong.")
    problems.extend(["a=2 is wrong.", "b=1 is wrong."])
    assert list(problems) == ["a=2 is wrong.", "b=1 is wrong."]
    assert len(problems) == 2


def test_nothing_is_raised_without_problems() -> None:
    problems = Problems()
    problems.raise_if_any()
    with problems.collecting():
        pass
    assert not problems


def test_collecting_keeps_the_problems_of_checks_that_raise() -> None:
    problems = Problems()
    ran = []
    with problems.collecting():
        raise ConfigError(["a=2 is wrong.", "b=1 is wrong."])
    with problems.collecting():
        ran.append("the next check")
        raise ConfigError("a=2 is wrong.")
    assert ran == ["the next check"]
    assert list(problems) == ["a=2 is wrong.", "b=1 is wrong."]


def test_collecting_passes_other_exceptions_through() -> None:
    problems = Problems()
    with pytest.raises(ZeroDivisionError), problems.collecting():
        _ = 1 / 0
    assert not problems

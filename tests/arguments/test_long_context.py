"""``max_length`` and ``long_context``: one number turns on what long sequences need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ds_trainer import TrainingArguments
from ds_trainer.utils.errors import ConfigError


def settings(**given: Any) -> tuple[Any, ...]:
    args = TrainingArguments("out", **given)
    return args.max_length, args.long_context, args.activation_checkpointing, args.tiled_mlp


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (None, False, False, False)),
        ({"max_length": "64K"}, (65536, False, False, False)),
        ({"max_length": 131071}, (131071, False, False, False)),
        ({"max_length": "128K"}, (131072, True, True, True)),
        ({"max_length": "1M"}, (1048576, True, True, True)),
        ({"max_length": "1M", "long_context": False}, (1048576, False, False, False)),
        ({"long_context": True}, (None, True, True, True)),
        ({"long_context": True, "tiled_mlp": False}, (None, True, True, False)),
        ({"long_context": True, "activation_checkpointing": False}, (None, True, False, True)),
        ({"long_context": True, "gradient_checkpointing": False}, (None, True, False, True)),
        ({"tiled_mlp": True}, (None, False, False, True)),
    ],
)
def test_what_follows_from_the_length(given: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    assert settings(**given) == wanted


@pytest.mark.parametrize("value", ["long", 0, -5, "0K", "1.00001K"])
def test_no_length(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_length=.* must be a positive number of tokens, such as"):
        TrainingArguments("out", max_length=value)


@dataclass
class OtherLength(TrainingArguments):
    """The ``max_length`` of another package."""

    max_length: int | None = 2**20


def test_the_length_of_another_package_means_nothing_here() -> None:
    args = OtherLength("out")
    assert (args.max_length, args.long_context) == (2**20, False)

"""Reads and checks the argument ``generation_config``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.utils.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import GenerationConfig

_REMEDY = "Change it, or leave generation_config out to use the model's own."


def read_generation_config(value: Any) -> GenerationConfig:
    """The generation configuration that ``value`` describes.

    Args:
        value: a ``GenerationConfig`` (copied), a mapping of its fields, or a location: a JSON file, a directory with a
            ``generation_config.json``, or a model on the Hub.

    Raises:
        ConfigError: it cannot be read, has unknown fields, or contradictory values.
    """
    from transformers import GenerationConfig

    shown = value.to_dict() if isinstance(value, GenerationConfig) else value
    try:
        if isinstance(value, GenerationConfig):
            config = deepcopy(value)
        elif isinstance(value, Mapping):
            config = _of_fields(value)
        else:
            config = _from_location(Path(os.path.expanduser(os.fspath(value))), str(value))
        problems = _problems(config)
        config.validate(strict=True)
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"generation_config={shown!r}: {_first_line(error)} {_REMEDY}") from error
    if problems:
        raise ConfigError([f"generation_config={shown!r}: {problem} {_REMEDY}" for problem in problems])
    return config


def _of_fields(fields: Mapping[str, Any]) -> GenerationConfig:
    from transformers import GenerationConfig

    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    unknown = [
        f"generation_config: {name!r} is not a field of GenerationConfig.{did_you_mean(name, known)}"
        for name in fields
        if name not in known
    ]
    if unknown:
        raise ConfigError(unknown)
    return GenerationConfig(**fields)


def _from_location(path: Path, name: str) -> GenerationConfig:
    from transformers import GenerationConfig

    if path.is_file():
        return GenerationConfig.from_pretrained(str(path.parent), config_file_name=path.name)
    return GenerationConfig.from_pretrained(str(path) if path.is_dir() else name)


def _problems(config: GenerationConfig) -> list[str]:
    """Problems that transformers' own check does not find and on which ``generate`` fails."""
    positive = ("max_length", "max_new_tokens", "num_beams", "num_return_sequences")
    found = []
    for name in positive:
        value = getattr(config, name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            found.append(f"{name}={value!r} must be a positive integer.")
    return found


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text.endswith(".") else f"{text}."

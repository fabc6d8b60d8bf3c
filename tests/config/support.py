"""Compiling in one line, for the tests of this folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.config.compiler import compile_config
from ds_trainer.config.environment import Environment
from ds_trainer.config.schema import Field
from ds_trainer.parallel.layout import ParallelLayout
from ds_trainer.planner.model_shape import ModelShape
from ds_trainer.utils.errors import ConfigError


def compiled(
    world: int = 1,
    device: str = "cpu",
    hidden: int | None = 256,
    environment: Environment | None = None,
    client_optimizer: str | None = None,
    total_steps: int | None = None,
    **arguments: Any,
) -> CompiledConfig:
    """The configuration of ``arguments`` for a model of width ``hidden`` on ``world`` ranks."""
    args = TrainingArguments("out", **arguments)
    shape = ModelShape(hidden, f"test.hidden_size={hidden}")
    layout = ParallelLayout.of(args, world)
    return compile_config(args, layout, shape, device, client_optimizer, environment, total_steps)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The warnings about settings without effect, in a list that grows."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ds_trainer.config")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def said(**arguments: Any) -> list[str]:
    """The problems of ``arguments`` for :func:`compiled`, or else the warnings about settings without effect."""
    with recorded() as said:
        try:
            compiled(**arguments)
        except ConfigError as error:
            return error.problems
    return said


def machine(*lacking: str, libaio: bool = True, writable: bool = True) -> Environment:
    """A machine that has everything but the packages ``lacking``."""
    return Environment(
        has_async_io=lambda: libaio,
        version=lambda package: None if package in lacking else "1.0.0",
        is_writable_directory=lambda path: writable,
    )


def leaves(section: Field, path: str = "") -> list[tuple[str, Field]]:
    """``(dotted path, field)`` of every key below ``section``."""
    found = []
    for name, field in section.fields.items():
        full = f"{path}.{name}" if path else name
        found += leaves(field, full) if field.kind == "section" else [(full, field)]
    return found


def nested(path: str, value: Any) -> dict[str, Any]:
    """A mapping with ``value`` at the dotted ``path``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)

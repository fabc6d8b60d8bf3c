"""Key-value caches are for generation; in training they only cost memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_given: dict[int, list[bool]] = {}  # of a configuration by its identity, while it is changed: what it was before


@contextmanager
def without_cache(model: nn.Module, unless: bool = False) -> Iterator[None]:
    """Key-value caches off inside, ``unless`` they are wanted.

    Only models with a ``config.use_cache`` (Hugging Face's) have such a switch; composite ones have it in the
    configuration of their text part.
    """
    configs = [] if unless else _configs_with_switch(model)
    before = [config.use_cache for config in configs]
    for config, value in zip(configs, before, strict=True):
        _given.setdefault(id(config), []).append(value)
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value
            _given[id(config)].pop()


@contextmanager
def cache_as_given(model: nn.Module) -> Iterator[None]:
    """The switches as they were before :func:`without_cache`: so a model is saved, also in the middle of a training."""
    now = [(config, config.use_cache, _given.get(id(config))) for config in _configs_with_switch(model)]
    for config, _, given in now:
        if given:
            config.use_cache = given[0]
    try:
        yield
    finally:
        for config, value, _ in now:
            config.use_cache = value


def _configs_with_switch(model: nn.Module) -> list[Any]:
    config: Any = getattr(model, "config", None)
    parts = [config]
    if hasattr(config, "get_text_config"):
        text = config.get_text_config()
        parts += [text] if text is not config else []
    return [part for part in parts if isinstance(getattr(part, "use_cache", None), bool)]

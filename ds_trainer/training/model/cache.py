"""Disables key-value caches in training, where they only cost memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_original: dict[int, list[bool]] = {}  # earlier values of each changed configuration, by its id


@contextmanager
def without_cache(model: nn.Module, unless: bool = False) -> Iterator[None]:
    """Inside, key-value caches are disabled; does nothing if ``unless``.

    Only models with a ``config.use_cache`` (Hugging Face's) have this switch; composite models have it in the
    configuration of their text model.
    """
    configs = [] if unless else _configs_with_switch(model)
    before = [config.use_cache for config in configs]
    for config, value in zip(configs, before, strict=True):
        _original.setdefault(id(config), []).append(value)
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value
            _original[id(config)].pop()


@contextmanager
def original_cache_settings(model: nn.Module) -> Iterator[None]:
    """Inside, the switches have their values from before :func:`without_cache`, so that a model is saved with them."""
    current = [(config, config.use_cache, _original.get(id(config))) for config in _configs_with_switch(model)]
    for config, _, original in current:
        if original:
            config.use_cache = original[0]
    try:
        yield
    finally:
        for config, value, _ in current:
            config.use_cache = value


def _configs_with_switch(model: nn.Module) -> list[Any]:
    config: Any = getattr(model, "config", None)
    parts = [config]
    if hasattr(config, "get_text_config"):
        text = config.get_text_config()
        parts += [text] if text is not config else []
    return [part for part in parts if isinstance(getattr(part, "use_cache", None), bool)]

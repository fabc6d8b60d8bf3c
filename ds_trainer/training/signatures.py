"""What a hook of a subclass looks like: older scripts override with shorter signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def is_overridden(instance: object, base: type, name: str) -> bool:
    """Whether ``instance`` has another method ``name`` than the one that ``base`` defines."""
    return getattr(type(instance), name) is not getattr(base, name)


def accepted_arguments(function: Callable[..., Any], optional: set[str]) -> set[str]:
    """Which of the ``optional`` keyword arguments ``function`` can be called with."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return set(optional)
    return optional & set(parameters)

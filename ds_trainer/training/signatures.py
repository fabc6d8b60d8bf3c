"""What a hook of a subclass looks like: older scripts override with shorter signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

_seen: WeakKeyDictionary[Any, Mapping[str, inspect.Parameter]] = WeakKeyDictionary()


def is_from(value: Any, *packages: str) -> bool:
    """Whether the class of ``value``, or one that it is derived from, comes from one of these packages."""
    return any(base.__module__.split(".")[0] in packages for base in type(value).__mro__)


def is_overridden(instance: object, base: type, name: str) -> bool:
    """Whether ``instance`` has another method ``name`` than the one that ``base`` defines."""
    return getattr(type(instance), name) is not getattr(base, name)


def accepted_arguments(function: Callable[..., Any], optional: set[str]) -> set[str]:
    """Which of the ``optional`` keyword arguments ``function`` can be called with."""
    parameters = parameters_of(function)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return set(optional)
    return optional & set(parameters)


def takes_shifted_labels(function: Callable[..., Any]) -> bool:
    """Whether ``function`` has an argument named ``shift_labels``; ``**kwargs`` alone does not count."""
    return "shift_labels" in inspect.signature(function).parameters


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of ``function`` by name; asked once for each function, since some are asked for every batch."""
    key = getattr(function, "__func__", function)
    try:
        if key not in _seen:
            _seen[key] = inspect.signature(function).parameters
        return _seen[key]
    except TypeError:  # an object that is called, and cannot be a key
        return inspect.signature(function).parameters

"""The calls that initialize the tensors of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class Initializer(NamedTuple):
    """One call that initializes a module or its submodules."""

    module: nn.Module
    description: str
    call: Callable[[], Any]


def initializers(model: nn.Module) -> list[Initializer]:
    """Returns the calls that initialize ``model``, in order: first those of each module, then those of the model.

    First ``reset_parameters()`` (or ``_reset_parameters()``) of every module that has it, children first, as the
    constructors of torch modules call it. Then, for a transformers model, ``_init_weights(module)`` for every module,
    children first; a nested model initializes its own modules.
    """
    result = [
        Initializer(module, f"{type(module).__name__}.{reset.__name__}()", reset)
        for module in reversed(list(_parents_first(model, set())))
        if (reset := _reset_method(module)) is not None
    ]
    if any(initializes_modules(module) for module in model.modules()):
        result += _by_model(model, None, set())
    return result


def _parents_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    seen.add(module)
    yield module
    for child in reversed(list(module.children())):
        if child not in seen:
            yield from _parents_first(child, seen)


def _reset_method(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method) and _required_arguments(method) == 0:
            return method
    return None


def _required_arguments(method: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return sum(item.kind in kinds and item.default is inspect.Parameter.empty for item in parameters)


def initializes_modules(module: nn.Module) -> bool:
    """Whether it is a transformers model, which initializes each module with ``_init_weights(module)``."""
    return hasattr(module, "_init_weights") and hasattr(module, "_initialize_weights")


def initializes_in_constructor(module: nn.Module) -> bool:
    """Whether its constructor likely calls its own initialization, as many non-torch modules do."""
    return not initializes_modules(module) and (hasattr(module, "_init_weights") or hasattr(module, "init_weights"))


def _by_model(module: nn.Module, model: nn.Module | None, seen: set[nn.Module]) -> Iterator[Initializer]:
    if module in seen:
        return
    seen.add(module)
    if initializes_modules(module):
        model = module
    for child in module.children():
        yield from _by_model(child, model, seen)
    if model is not None:
        initialize: Any = model._init_weights
        description = f"{type(model).__name__}._init_weights({type(module).__name__})"
        yield Initializer(module, description, lambda: initialize(module))


@contextmanager
def untied(model: nn.Module) -> Iterator[None]:
    """Unties weights inside the block: each belongs to the module of its first name, which initializes it.

    This is the situation in constructors, where modules initialize themselves before they are tied.
    """
    seen: set[int] = set()
    apart = []
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) in seen:
                    apart.append((module, key, parameter))
                seen.add(id(parameter))
    try:
        for module, key, parameter in apart:
            module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"))
        yield
    finally:
        for module, key, parameter in apart:
            module._parameters[key] = parameter


@contextmanager
def marked_uninitialized(model: nn.Module) -> Iterator[None]:
    """Removes transformers' initialization marks inside the block; it does not initialize marked tensors."""
    mark = "_is_hf_initialized"
    marked = [tensor for tensor in all_tensors(model) if hasattr(tensor, mark)]
    marks = [getattr(tensor, mark) for tensor in marked]
    for tensor in marked:
        delattr(tensor, mark)
    try:
        yield
    finally:
        for tensor, value in zip(marked, marks, strict=True):
            setattr(tensor, mark, value)


@contextmanager
def global_generator_unchanged() -> Iterator[None]:
    """Restore the state of torch's global generator afterwards."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def all_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer of ``model``."""
    yield from model.parameters()
    yield from model.buffers()

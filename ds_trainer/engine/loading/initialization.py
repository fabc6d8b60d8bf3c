"""The calls by which a model initializes itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


class Initializer(NamedTuple):
    """One call that initializes a module, of itself or of what it holds."""

    module: nn.Module
    description: str
    call: Callable[[], Any]


def initializers(model: nn.Module) -> list[Initializer]:
    """The calls that initialize ``model``, in order: what each module does by itself, then what its model wants.

    ``reset_parameters()`` of every module that has it (``_reset_parameters()`` otherwise), children first, as the
    constructors of torch's modules call it. Then, of a transformers model, ``_init_weights(module)`` for every module,
    children first; a model within the model initializes its own modules.
    """
    found = [
        Initializer(module, f"{type(module).__name__}.{reset.__name__}()", reset)
        for module in _children_first(model)
        if (reset := _reset_method(module)) is not None
    ]
    if any(initializes_modules(module) for module in model.modules()):
        found += _by_model(model, None, set())
    return found


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    return reversed(list(_parents_first(module, set())))


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
    """Whether it is a model of transformers, which initializes each of its modules with ``_init_weights(module)``."""
    return hasattr(module, "_init_weights") and hasattr(module, "_initialize_weights")


def initializes_in_constructor(module: nn.Module) -> bool:
    """Whether it likely calls an initialization of its own in its constructor, as many models but torch's do."""
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
    """Tied weights are apart within: each belongs to the module of its first name, which initializes it.

    So it is in constructors, where modules initialize themselves before they are tied.
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
    """transformers leaves alone what it has marked; the marks are gone within, and back afterwards."""
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
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def all_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()

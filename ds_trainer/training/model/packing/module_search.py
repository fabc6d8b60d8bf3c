"""Finds the first module of a forward pass whose outputs differ between two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


class _Call(NamedTuple):
    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class Recording:
    """Inputs and outputs of all modules in a forward pass, in the order in which the modules end.

    Meant for a few tokens: everything is kept.

    Args:
        model: the module that runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[_Call] = []
        self._handles = [
            module.register_forward_hook(self._hook(f"{name} ({type(module).__name__})"), with_kwargs=True)
            for name, module in model.named_modules()
            if name
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            self.calls.append(_Call(name, list(_tensors([args, keywords])), list(_tensors(output))))

        return record

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def first_difference(
    first: Recording,
    second: Recording,
    difference: Callable[[torch.Tensor, torch.Tensor], float],
    allowed: float,
    through_inputs: bool,
) -> str | None:
    """Name and class of the first module whose outputs differ; None if there is none.

    Args:
        first, second: two runs of the same model.
        difference: relative difference of two tensors; 0 if they do not have one value per token.
        allowed: the largest difference that is rounding.
        through_inputs: whether it may be one whose inputs differ already. Otherwise it is the smallest module around
            the operation that makes the difference, unless there is none.
    """
    found = None
    for one, two in zip(first.calls, second.calls, strict=False):
        if one.name != two.name or not _differ(one.outputs, two.outputs, difference, allowed):
            continue
        if through_inputs or not _differ(one.inputs, two.inputs, difference, allowed):
            return one.name
        found = found or one.name
    return found


def _differ(one: list[torch.Tensor], two: list[torch.Tensor], difference: Callable[..., float], allowed: float) -> bool:
    return any(difference(a, b) > allowed for a, b in zip(one, two, strict=False))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.dim() >= 3 and value.is_floating_point():  # [rows, tokens, ...]
            yield value.detach()
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)

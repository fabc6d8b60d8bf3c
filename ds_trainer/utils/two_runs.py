"""Two runs of the same model, compared: what the proofs at the start of a training measure, and where runs part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


def relative_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The 2-norm of the difference, relative to ``expected``; in float64."""
    return ratio((value.double() - expected.double()).norm(), expected.double().norm())


def rms(value: torch.Tensor) -> float:
    """The root mean square of all elements, in float64."""
    return value.double().square().mean().sqrt().item()


def largest_row_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest 2-norm of a row's difference, relative to that of the row or of the mean row, if that is larger."""
    if not expected.numel():
        return 0.0
    wanted = expected.double().flatten(1)
    size = wanted.norm(dim=1)
    size = size.clamp(min=size.square().mean().sqrt().clamp(min=1e-30))
    return float(((value.double().flatten(1) - wanted).norm(dim=1) / size).max())


def ratio(difference: torch.Tensor, size: torch.Tensor) -> float:
    """0 if what was expected is not finite, which other checks report; nan if only the other value is not."""
    return float(torch.where(size.isfinite(), difference / size.clamp(min=1e-30), 0.0))


class _Call(NamedTuple):
    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def first_difference(
    model: nn.Module,
    first: Callable[[], Any],
    second: Callable[[], Any],
    difference: Callable[[torch.Tensor, torch.Tensor], float],
    allowed: float,
    through_inputs: bool,
) -> str | None:
    """Run a model twice; name and class of the first module whose outputs differ, None if there is none.

    Meant for a few tokens: all inputs and outputs of modules are kept.

    Args:
        model: an engine, or a module.
        first, second: the two runs.
        difference: relative difference of two tensors; 0 if they do not have one value per token.
        allowed: the largest difference that is rounding.
        through_inputs: whether it may be one whose inputs differ already. Otherwise it is the smallest module around
            the operation that makes the difference, unless there is none.
    """

    def differ(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
        return any(difference(a, b) > allowed for a, b in zip(one, two, strict=False))

    inside = getattr(model, "module", model)
    later = None
    for one, two in zip(_recorded(inside, first), _recorded(inside, second), strict=False):
        if one.name != two.name or not differ(one.outputs, two.outputs):
            continue
        if through_inputs or not differ(one.inputs, two.inputs):
            return one.name
        later = later or one.name
    return later


def _recorded(model: nn.Module, run: Callable[[], Any]) -> list[_Call]:
    """Inputs and outputs of all modules in a run, in the order in which the modules end."""
    calls: list[_Call] = []

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            calls.append(_Call(name, list(_tensors([args, keywords])), list(_tensors(output))))

        return record

    handles = [
        module.register_forward_hook(hook(f"{name} ({type(module).__name__})"), with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


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

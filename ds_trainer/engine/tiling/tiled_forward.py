"""``TiledForward``: a per-token module runs on a tile of tokens at a time, and again in the backward pass.

An MLP of inner width ``4 x hidden`` keeps several tensors of that width for its backward pass: at a million tokens they
are the largest activations of a model. If the module acts on each token alone, it can run on a tile of tokens, keep
nothing but its input, and run again tile by tile in the backward pass (Arctic Long Sequence Training, arXiv
2506.13996).

The parameters are inputs of the autograd function, which returns the sum of their gradients over all tiles. So autograd
sees one gradient for each parameter, and whatever waits for it (the reduction of ZeRO 1, 2 and 3) runs once per
backward pass. Sums of 16-bit gradients are kept in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd


class TiledForward:
    """Replaces ``module.forward`` until :meth:`remove`. The module takes a tensor ``[..., width]`` and returns one.

    Args:
        module: acts on each token alone (:mod:`ds_trainer.engine.tiling.per_token` finds and verifies such modules).
        rows: tokens of a tile, at least 1. A call with no more tokens runs the module as it is.

    Attributes:
        rows: see above.
    """

    def __init__(self, module: nn.Module, rows: int) -> None:
        self.rows = rows
        self._module = module
        self._has_own = "forward" in vars(module)  # an instance attribute, as Liger sets it
        self._forward: Callable[..., Any] = module.forward
        self._draws: bool | None = None  # whether a forward pass in training mode has drawn random numbers
        module.forward = self

    def remove(self) -> None:
        """Restore the forward pass of the module."""
        if self._has_own:
            self._module.forward = self._forward
        else:
            del self._module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        values = [*args, *kwargs.values()]
        if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].dim() < 2:
            return self._forward(*args, **kwargs)
        (x,) = values
        if x.numel() <= self.rows * x.shape[-1]:
            return self._forward(*args, **kwargs)
        # Read at each call: an engine replaces modules and parameters, and adapters freeze them.
        parameters = tuple(self._module.parameters())
        if not torch.is_grad_enabled() or not (x.requires_grad or any(p.requires_grad for p in parameters)):
            return _by_tiles(self._forward, x, self.rows)
        if not self._module.training:
            return _Tiled.apply(self._forward, self.rows, False, x, *parameters)
        if self._draws is None:
            before = _generator_state(x.device)
            out = _Tiled.apply(self._forward, self.rows, True, x, *parameters)
            other = _generator_state(x.device)
            pairs = zip(before, other, strict=True)
            self._draws = not all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
            return out
        return _Tiled.apply(
            self._forward,
            self.rows,
            self._draws or any(isinstance(part, _DropoutNd) and part.p > 0 for part in self._module.modules()),
            x,
            *parameters,
        )


def tiled_forward(module: nn.Module) -> TiledForward | None:
    """The tiled forward pass of ``module``; None if it is not tiled."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, TiledForward) else None


class _Tiled(torch.autograd.Function):
    """Keeps its input only."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], rows: int, draws: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.run, ctx.rows, ctx.parameters = run, rows, parameters
        # One state is enough: the backward pass runs the tiles in the same order, which draw the same numbers.
        ctx.generators = _generator_state(x.device) if draws else None
        ctx.autocast = {
            "enabled": torch.is_autocast_enabled(x.device.type),
            "dtype": torch.get_autocast_dtype(x.device.type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        return _by_tiles(run, x, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        _, _, _, wants_x, *wanted = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        trained = [p for p, wants in zip(ctx.parameters, wanted, strict=True) if wants]
        sums: list[Tensor | None] = [None] * len(trained)
        tokens, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_x = torch.empty_like(tokens) if wants_x else None
        with _generators(ctx.generators, x.device), torch.enable_grad(), torch.autocast(x.device.type, **ctx.autocast):
            for start in range(0, len(tokens), ctx.rows):
                tile = slice(start, start + ctx.rows)
                part = tokens[tile].unsqueeze(0).detach().requires_grad_(wants_x)
                inputs = [part, *trained] if wants_x else trained
                gradients = torch.autograd.grad(ctx.run(part), inputs, grads[tile].unsqueeze(0), allow_unused=True)
                if grad_x is not None:
                    grad_x[tile] = 0 if gradients[0] is None else gradients[0][0]
                    gradients = gradients[1:]
                sums = [_added(total, new) for total, new in zip(sums, gradients, strict=True)]
        of_trained = iter(total if total is None else total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        of_parameters = [next(of_trained) if wants else None for wants in wanted]
        return None, None, None, None if grad_x is None else grad_x.view(x.shape), *of_parameters


def _by_tiles(run: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    out: Tensor | None = None
    for start in range(0, len(tokens), rows):
        part = run(tokens[start : start + rows].unsqueeze(0))
        if out is None:  # filled in place: concatenated tiles would be there twice
            out = part.new_empty(len(tokens), part.shape[-1])
        out[start : start + rows] = part[0]
    assert out is not None
    return out.view(*x.shape[:-1], out.shape[-1])


def _added(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    """The sum of gradients, in float32 or a wider type."""
    if new is None:
        return total
    wide = new.to(torch.promote_types(new.dtype, torch.float32))
    if total is None:
        return wide.clone() if wide is new else wide  # the result of autograd may be part of another tensor
    return total.add_(wide)


def _generator_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _generators(state: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Iterator[None]:
    """Inside, the generators continue from ``state``; afterwards from where they were."""
    if state is None:
        yield
        return
    before = _generator_state(device)
    _set_generators(state, device)
    try:
        yield
    finally:
        _set_generators(before, device)


def _set_generators(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)

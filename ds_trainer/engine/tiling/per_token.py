"""Finds the MLPs and norms of a model, and verifies that they act on each token alone.

**Structure.** An MLP takes one tensor, has at least two matrices, one of which is wider than the tensor, and no
parameter of three dimensions (a convolution, stacked experts). A norm has nothing but vectors of the width of its input
and is computed by several operations in Python; PyTorch's own norms are one kernel that keeps nothing but its input.

**Verification.** Structure does not show what a forward pass does. So a copy with random weights runs on a few random
tokens, whole and in two tiles. Outputs, the gradient of the input and the gradients of all parameters must be equal.
MLPs of the same class, settings and sizes are verified once. MoE blocks are left out: a router may have a capacity, or
a loss that depends on all tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.tiling.tiled_forward import TiledForward, tiled_forward
from ds_trainer.engine.weights import full_shape
from ds_trainer.engine.zero3.leaf_modules import moe_blocks
from ds_trainer.utils.two_runs import relative_difference

_TOKENS, _TILE = 7, 4  # of the verification: two tiles of different sizes
_TOLERANCE = 1e-3  # relative; a module that mixes tokens is off by about 1, TensorFloat-32 by less than this
_FUSED = (nn.LayerNorm, nn.RMSNorm)


@dataclass
class Tiling:
    """What :func:`tile_modules` did.

    Attributes:
        mlps, norms: names of the tiled modules.
        left_out: name and reason of modules that look like an MLP but were not tiled; one of each kind.
    """

    mlps: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def tile_modules(model: nn.Module, device: torch.device) -> Tiling:
    """Makes the MLPs and norms of ``model`` run on a few tokens at a time. Not collective, before the engine.

    An MLP of width ``h`` runs on ``h`` tokens at a time: a tile is then as large as one of its smaller matrices.

    Args:
        model: may be tiled already; on any device, on the meta device, or partitioned by ZeRO-3.
        device: device of the verification.
    """
    remove_tiling(model)
    tiling, verified, widths = Tiling(), _Verified(device), []
    for name, module in _mlps(model, set(moe_blocks(model).values()), "", tiling, verified):
        width = verified.width(module)
        TiledForward(module, rows=width)
        tiling.mlps.append(name)
        widths.append(width)
    elements = max(widths, default=0) ** 2
    for name, module in model.named_modules():
        if elements and _is_norm(module) and (width := verified.width(module)):
            TiledForward(module, rows=max(1, elements // width))
            tiling.norms.append(name)
    return tiling


def remove_tiling(model: nn.Module) -> None:
    """Undoes :func:`tile_modules`."""
    for module in model.modules():
        tiled = tiled_forward(module)
        if tiled is not None:
            tiled.remove()


def looks_like_mlp(module: nn.Module) -> bool:
    """Whether ``module`` has the structure of an MLP."""
    sizes = [full_shape(parameter) for parameter in module.parameters()]
    matrices = [size for size in sizes if len(size) == 2]
    if len(matrices) < 2 or max(map(len, sizes)) > 2 or not _takes_one_tensor(module):
        return False
    if any(isinstance(part, nn.Embedding) or len(list(_lists(part))) > 1 for part in module.modules()):
        return False
    dimensions = {size for matrix in matrices for size in matrix}
    return len(dimensions) > 1  # not only squares: there is an inner width


def _mlps(
    module: nn.Module, experts: set[nn.Module], prefix: str, tiling: Tiling, verified: _Verified
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules below ``module`` that can be tiled."""
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if child in experts:
            continue
        if not looks_like_mlp(child):
            yield from _mlps(child, experts, f"{name}.", tiling, verified)
            continue
        if verified.width(child):
            yield name, child
            continue
        inner = list(_mlps(child, experts, f"{name}.", tiling, verified))
        # Whether `child` itself was verified, not another one of its kind.
        if not inner and (verified._result(child)[2] is child):
            tiling.left_out[name] = verified.problem(child)
        yield from inner


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    if not parameters or any(True for _ in module.children()) or isinstance(module, _FUSED):
        return False
    return all(len(full_shape(p)) == 1 for p in parameters) and _takes_one_tensor(module)


def _takes_one_tensor(module: nn.Module) -> bool:
    taken = inspect.signature(module.forward).parameters.values()
    return [p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken] == [True]


def _lists(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of a list of modules."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield from module.children()


class _Verified:
    """Results of verifications, one for each kind of module."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._results: dict[Any, tuple[int, str, nn.Module]] = {}

    def width(self, module: nn.Module) -> int:
        """Size of a token of ``module``; 0 if it does not act on each token alone."""
        return self._result(module)[0]

    def problem(self, module: nn.Module) -> str:
        """Why it cannot be tiled; empty if it can."""
        return self._result(module)[1]

    def _result(self, module: nn.Module) -> tuple[int, str, nn.Module]:
        shapes = tuple((name, full_shape(p), p.requires_grad) for name, p in module.named_parameters())
        kind = (type(module), repr(module), shapes)
        if kind not in self._results:
            self._results[kind] = (*_verify(module, self._device), module)
        return self._results[kind]


def _verify(module: nn.Module, device: torch.device) -> tuple[int, str]:
    """The width of the tokens of ``module``, or 0 and the reason why it cannot be tiled."""
    if not all(p.is_floating_point() for p in module.parameters()):
        return 0, "its weights are quantized"
    problem = "it does not return a tensor of the shape of its input"
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        copied = _with_random_weights(module, device)
        for width in sorted({size for p in copied.parameters() for size in p.shape}):
            x = torch.randn(1, _TOKENS, width, device=device)
            try:
                whole = _results(copied, x)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # not its width
                continue
            if whole is None:
                continue
            tiled = TiledForward(copied, _TILE)
            parts = _results(copied, x)
            tiled.remove()
            if parts is not None and _are_equal(whole, parts):
                return width, ""
            problem = "its result for a token depends on other tokens"
    return 0, problem


def _results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None] | None:
    """Output, gradient of the input and gradients of the parameters; None if the output is no tensor like ``x``."""
    x = x.clone().requires_grad_()
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        out = module(x)
        if not isinstance(out, torch.Tensor) or out.shape != x.shape or not out.requires_grad:
            return None
        weights = torch.linspace(0.5, 1.5, out.numel(), device=x.device).view_as(out)  # every element counts
        inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
        return [out.detach(), *torch.autograd.grad(out, inputs, weights, allow_unused=True)]


def _are_equal(whole: list[torch.Tensor | None], parts: list[torch.Tensor | None]) -> bool:
    for a, b in zip(whole, parts, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and not relative_difference(b, a) <= _TOLERANCE:
            return False
    return True


def _with_random_weights(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy in float32 on ``device`` without dropout, otherwise in training mode. No weight is read."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        shape = full_shape(parameter)
        values = torch.randn(shape, device=device) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device, copy=True)
    copied: nn.Module = copy.deepcopy(module, memo).train()
    for part in copied.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
    return copied

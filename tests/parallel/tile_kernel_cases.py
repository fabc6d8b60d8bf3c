"""The loss in tiles and in one pass with Triton's kernels, against those without, on a GPU or, interpreted, on the CPU.

TRITON_INTERPRET=1 python tile_kernel_cases.py
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import torch

from ds_trainer.parallel import linear_cross_entropy as module
from ds_trainer.parallel import one_pass_cross_entropy as one_pass
from ds_trainer.parallel.linear_cross_entropy import TileSettings, linear_cross_entropy

TOKENS, WIDTH, CLASSES = 37, 16, 101


def numbers(dtype: torch.dtype, device: str, settings: TileSettings, kernels: bool) -> list[torch.Tensor]:
    """Losses of the tokens, and gradients of a weighted sum of them, and of their sum, for a head with LoRA."""
    torch.manual_seed(0)
    shapes = ((TOKENS, WIDTH), (CLASSES, WIDTH), (TOKENS, 8), (CLASSES, 8))
    leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(0, CLASSES, (TOKENS,)).to(device)
    targets[::5] = -100
    products = module.Products

    class Chosen(products):  # type: ignore[misc, valid-type]
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            self.has_kernels = kernels

    with mock.patch.object(module, "Products", Chosen), mock.patch.object(one_pass, "Products", Chosen):
        terms = [(leaves[0], leaves[1]), (leaves[2], leaves[3])]
        total, apart = one_pass.one_pass_cross_entropy(terms, None, targets, settings)
        summed = [total.detach(), apart, *torch.autograd.grad(total, leaves)]
        losses = linear_cross_entropy(terms, None, targets, settings)
        weights = torch.linspace(-1, 2, TOKENS, dtype=losses.dtype, device=device)
        found = [losses.detach(), *torch.autograd.grad((losses * weights).sum(), leaves)]
    return [one.double().cpu() for one in (*found, *summed)]


def largest_difference(device: str) -> dict[str, float]:
    """Relative, over settings and sizes of tiles, for each dtype."""
    found: dict[str, float] = {}
    for dtype, smoothing, factor, chunks in itertools.product(
        (torch.float32, torch.bfloat16), (0.0, 0.1), (0.0, 1e-2), ((7, 13), (TOKENS, CLASSES), (64, 40))
    ):
        settings = replace(TileSettings(*chunks), label_smoothing=smoothing, z_loss=factor)
        pairs = zip(*(numbers(dtype, device, settings, kernels) for kernels in (True, False)), strict=True)
        worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        found[str(dtype)] = max(found.get(str(dtype), 0.0), worst)
    return found


if __name__ == "__main__":
    import json

    from ds_trainer.parallel import tile_kernels

    tile_kernels._BLOCK = 16  # several blocks in a row
    print(json.dumps(largest_difference("cpu")))

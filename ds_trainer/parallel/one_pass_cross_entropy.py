"""The summed cross-entropy of a linear head whose gradients are made in the forward pass: three products, not four.

The loss of :mod:`ds_trainer.parallel.linear_cross_entropy` computes each tile of logits again in the backward pass,
because it knows no weight of a token before. A sum over the tokens has the same weight for all of them, one number
that comes with the backward pass. So the logits of some tokens, all of the vocabulary, are computed once: from them
follow the losses, and the gradients of the inputs and of the weight up to that number.

The price is memory. The gradient of the weight exists in float32 between the two passes, beside the one that it
becomes; and the logits of a chunk exist over the whole vocabulary. A gradient in 16 bits is rounded once, after it was
multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_trainer.parallel.linear_cross_entropy import (
    Products,
    Tiles,
    TileSettings,
    operand_dtype,
)

_LOGITS, _LOGITS_ON_GPU = 2**23, 2**27  # float32 numbers of a chunk
_FP16_FACTOR = 2.0**15  # probabilities below 6e-8 are zero in fp16; at most 1 times this is a number
_ROWS = 4096  # of the weight, multiplied together


def chunk_tokens(classes: int, device: torch.device, wanted: int | None = None) -> int:
    """Tokens whose logits exist together, for ``classes`` on this rank; at most the ``wanted`` ones."""
    tokens = max(16, (_LOGITS if device.type == "cpu" else _LOGITS_ON_GPU) // classes)
    return tokens if wanted is None else min(tokens, wanted)


def one_pass_cross_entropy(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    settings: TileSettings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of all tokens, with its gradient, and the loss of each token ``[T]``, without one.

    Both are float32 (float64 for a float64 head). The arguments are those of
    :func:`~ds_trainer.parallel.linear_cross_entropy.linear_cross_entropy`, with ``chunk_tokens`` of the settings as the
    most tokens whose logits exist together. With a partitioned vocabulary, collective over its group, twice a chunk.

    Raises:
        RuntimeError: a target is no class.
    """
    tensors = [tensor for pair in terms for tensor in pair]
    dtype = operand_dtype(terms[0][0])
    total, losses = _OnePass.apply(settings, dtype, targets, bias, *tensors)
    return total, losses


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: TileSettings,
        dtype: torch.dtype,
        targets: torch.Tensor,
        bias: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weights = tensors[0::2], tensors[1::2]
        needs_bias, *needs = ctx.needs_input_grad[3:]
        products = Products(dtype, hidden[0].device)
        with torch.autocast(hidden[0].device.type, enabled=False):
            losses, gradients = _both(
                Tiles(settings, products, hidden, weights, bias), targets, needs[0::2], needs[1::2], needs_bias
            )
        ctx.dtypes = [None if one is None else one.dtype for one in (bias, *tensors)]
        ctx.factor = _factor(products)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        scale = gradient / ctx.factor
        gradients = [
            None if one is None else _scaled(one, scale, dtype)
            for one, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (None, None, None, *gradients)


def _factor(products: Products) -> float:
    return _FP16_FACTOR if products.factor_dtype == torch.float16 else 1.0


def _scaled(gradient: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``gradient * scale``, rounded once to ``dtype``; some rows at a time, so that no second float32 copy exists."""
    result = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    for start in range(0, len(gradient), _ROWS):
        torch.mul(gradient[start : start + _ROWS], scale, out=result[start : start + _ROWS])
    return result


def _both(
    tiles: Tiles, targets: torch.Tensor, needs_hidden: Sequence[bool], needs_weight: Sequence[bool], needs_bias: bool
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The loss of each token; for their sum, the gradients of the bias and of each input and weight."""
    tiles.check(targets)
    products, sums, device = tiles.products, tiles.products.sums, targets.device
    operands = [products.operand(weight) for weight in tiles.weights]
    of_hidden = [
        torch.empty(x.shape, dtype=sums, device=device) if needed else None
        for x, needed in zip(tiles.hidden, needs_hidden, strict=True)
    ]
    of_weights = [
        torch.zeros(weight.shape, dtype=sums, device=device) if needed else None
        for weight, needed in zip(tiles.weights, needs_weight, strict=True)
    ]
    of_bias = torch.zeros(tiles.rows, dtype=sums, device=device) if needs_bias else None
    losses = torch.empty(tiles.tokens, dtype=sums, device=device)
    for tokens, hidden in tiles.chunks():
        linear = tiles.linear(hidden, operands, slice(0, tiles.rows))
        losses[tokens], tile = _chunk(tiles, linear, targets[tokens])
        del linear
        if of_bias is not None:
            of_bias += tile.sum(0, dtype=sums)
        for x, weight, of_x, of_weight in zip(hidden, operands, of_hidden, of_weights, strict=True):
            if of_x is not None:
                products.write(of_x[tokens], tile, weight)
            if of_weight is not None:
                products.add(of_weight, tile.t(), x)
    for one in of_hidden:
        if one is not None and tiles.settings.group is not None:
            dist.all_reduce(one, group=tiles.settings.group)
    return losses, [of_bias, *(one for pair in zip(of_hidden, of_weights, strict=True) for one in pair)]


def _chunk(tiles: Tiles, linear: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of some tokens, and the gradient of ``linear``, which is overwritten, as a factor of products."""
    settings, sums, rows = tiles.settings, tiles.products.sums, slice(0, tiles.rows)
    total = torch.zeros(len(targets), dtype=sums, device=linear.device)
    if tiles.uses_kernels:
        from ds_trainer.parallel import tile_kernels

        largest = torch.full_like(total, torch.finfo(sums).min)
        exponentials, at_target = torch.zeros_like(total), torch.zeros_like(total)
        sum_of_logits = total if settings.label_smoothing else None
        tile_kernels.add_statistics(
            linear, tiles.columns(targets, rows), largest, exponentials, at_target, sum_of_logits
        )
    else:
        with torch.enable_grad():
            logits = tiles.logits(linear.requires_grad_(), rows) if settings.functions else linear
        values = logits.detach()
        columns, inside = tiles.target_columns(targets, rows)
        at_target = torch.where(inside, values.gather(1, columns), 0.0).squeeze(1)
        if settings.label_smoothing:
            total = values.sum(1)
        largest = values.amax(1).clamp(min=torch.finfo(sums).min)
    if settings.group is not None:
        own = largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=settings.group)
    if tiles.uses_kernels:
        if settings.group is not None:
            exponentials *= (own - largest).exp()
    else:
        tile = (values - largest.unsqueeze(1) if settings.functions else values.sub_(largest.unsqueeze(1))).exp_()
        exponentials = tile.sum(1)
    if settings.group is not None:
        both = torch.stack([exponentials, at_target, total])
        dist.all_reduce(both, group=settings.group)
        exponentials, at_target, total = both
    lse = largest + exponentials.log()
    by_token = (targets != settings.ignore_index).to(sums) * _factor(tiles.products)
    share = by_token * (1 + 2 * settings.z_loss * lse) if settings.z_loss else by_token
    spread = by_token * (settings.label_smoothing / tiles.classes) if settings.label_smoothing else None
    of_target = (settings.label_smoothing - 1) * by_token
    if tiles.uses_kernels:
        tile = tile_kernels.gradient(
            tile=linear,
            columns=tiles.columns(targets, rows),
            lse=lse,
            share=share,
            at_target=of_target,
            spread=spread,
            dtype=tiles.products.factor_dtype,
        )
    else:
        tile.mul_((share / exponentials).unsqueeze(1))
        tile.scatter_add_(1, columns, torch.where(inside, of_target.unsqueeze(1), 0.0))
        if spread is not None:
            tile.sub_(spread.unsqueeze(1))
        if settings.functions:
            (tile,) = torch.autograd.grad(logits, linear, tile)
    return tiles.losses(targets, lse, at_target, total), tile.to(tiles.products.factor_dtype)

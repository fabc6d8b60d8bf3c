"""Cross-entropy of a linear head in tiles: the logits of a whole sequence never exist, forward or backward.

The logits ``y = f(sum_i x_i W_i^T + b)`` are computed for one tile at a time, some tokens by some rows of the
vocabulary. The forward pass keeps three numbers of a token: the logarithm of the sum of ``exp(y)``, the logit of the
target, and with label smoothing the sum of the logits. The loss of a token is

    ``(1 - e) * (lse - y[target]) + e * (lse - mean(y)) + z * lse^2``

with label smoothing ``e`` and z-loss factor ``z``. The backward pass computes each tile again. The alternative, to
compute the gradients in the forward pass and keep them, costs one product of matrices less, but needs the gradient of
the weight in float32 between the passes: 2 GiB for 128,000 tokens of 4,096 dimensions. It also knows only a sum of the
losses; here each token has its loss, so any weighting of tokens can follow.

All sums over tokens and over the vocabulary are float32. With the vocabulary partitioned over a group, a rank holds the
rows from ``offset`` on: three numbers of a token are reduced in the forward pass, the gradient of ``x_i`` in the
backward pass. All ranks of the group must have the same tokens; the tiles of a rank are its own affair.

Sources: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"; the z-loss is that of PaLM
(Chowdhery et al. 2022, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ds_trainer.parallel.kernel_trial import kernels_work

_TOKENS, _TOKENS_ON_GPU = 1024, 4096
_ROWS = 4096
_ELEMENTS_ON_GPU = 2**24  # of a tile: with fewer, starting the kernels takes longer than they do
# Products of 16-bit matrices with a float32 result, without a copy of the operands (CUDA, torch >= 2.8).
_HAS_WIDE_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")

ElementwiseFunction = Callable[[torch.Tensor, slice], torch.Tensor]
"""A function of a tile of logits, element by element, and of the rows of the vocabulary that the tile has."""


def tile_sizes(chunk_tokens: int | None, device: torch.device) -> tuple[int, int]:
    """Tokens and rows of the vocabulary in a tile; ``chunk_tokens`` is what the user wants, None for a good choice."""
    if device.type == "cpu":
        return chunk_tokens or _TOKENS, _ROWS
    tokens = chunk_tokens or _TOKENS_ON_GPU
    return tokens, max(_ROWS, _ELEMENTS_ON_GPU // tokens)


@dataclass(frozen=True)
class TileSettings:
    """How the loss is computed.

    Attributes:
        chunk_tokens: tokens in a tile.
        vocabulary_chunk: rows of the vocabulary in a tile.
        ignore_index: a target of this value has no loss.
        label_smoothing: the probability that is spread over all classes.
        z_loss: factor of the squared logarithm of the sum of ``exp(y)``.
        functions: applied to the logits one after the other (soft caps, scales).
        classes: the size of the whole vocabulary; None for that of the weight.
        offset: the first row of the vocabulary on this rank.
        group: the ranks over which the vocabulary is partitioned; None: not partitioned.
    """

    chunk_tokens: int = _TOKENS
    vocabulary_chunk: int = _ROWS
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    functions: tuple[ElementwiseFunction, ...] = field(default=())
    classes: int | None = None
    offset: int = 0
    group: dist.ProcessGroup | None = None


def linear_cross_entropy(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    settings: TileSettings,
) -> torch.Tensor:
    """The loss of each token: float32 ``[T]`` (float64 for a float64 head), 0 where there is no target.

    Args:
        terms: pairs of ``x_i`` ``[T, H_i]`` and ``W_i`` ``[V, H_i]``; a head with LoRA has two. The gradients have
            their dtypes.
        bias: ``[V]``.
        targets: classes ``[T]``, integers.
        settings: how.

    Raises:
        RuntimeError: a target is no class.
    """
    tensors = [tensor for pair in terms for tensor in pair]
    losses: torch.Tensor = _LinearCrossEntropy.apply(settings, operand_dtype(terms[0][0]), targets, bias, *tensors)
    return losses


def operand_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype in which the head multiplies ``hidden``."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _parts(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


class Products:
    """Products of matrices with a float32 result (float64 for float64 operands).

    Args:
        dtype: of operands, where the device multiplies it with a float32 result; elsewhere it is that of the values
            that come from the model, and the product is computed in float32.

    Attributes:
        sums: dtype of the results.
        has_kernels: tiles can be given to :mod:`ds_trainer.parallel.tile_kernels`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        half = dtype in (torch.bfloat16, torch.float16)
        self.sums = torch.float64 if dtype == torch.float64 else torch.float32
        nvidia = device.type == "cuda" and torch.version.hip is None
        self._wide = half and nvidia and _HAS_WIDE_PRODUCTS
        self.has_kernels = self.sums == torch.float32 and kernels_work(device)
        self._dtype = dtype

    @property
    def factor_dtype(self) -> torch.dtype:
        """The dtype in which a factor is multiplied."""
        return self._dtype if self._wide else self.sums

    def operand(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the model, as an operand."""
        tensor = tensor.to(self._dtype)
        return tensor if self._wide else tensor.to(self.sums)

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The product."""
        if self._wide:
            return torch.mm(a.to(self._dtype), b.to(self._dtype), out_dtype=self.sums)
        return torch.mm(a, b)

    def write(self, result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Write the product to ``result``."""
        if self._wide:
            torch.mm(a.to(self._dtype), b.to(self._dtype), out_dtype=self.sums, out=result)
        else:
            torch.mm(a, b, out=result)

    def add(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the product to ``total``, in place."""
        if self._wide:
            torch.addmm(total, a.to(self._dtype), b.to(self._dtype), out_dtype=self.sums, out=total)
        else:
            total.addmm_(a, b)


class Tiles:
    """The logits of a head, one tile at a time."""

    def __init__(
        self,
        settings: TileSettings,
        products: Products,
        hidden: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
    ) -> None:
        self.settings, self.products = settings, products
        self.hidden, self.weights, self.bias = hidden, weights, bias
        self.tokens, self.rows = hidden[0].shape[0], weights[0].shape[0]
        self.classes = settings.classes or self.rows
        self.uses_kernels = products.has_kernels and not settings.functions and bias is None

    def check(self, targets: torch.Tensor) -> None:
        """Fail, on the device, if a target is no class."""
        valid = (targets == self.settings.ignore_index) | ((targets >= 0) & (targets < self.classes))
        torch._assert_async(valid.all(), "a target is no class")

    def losses(
        self, targets: torch.Tensor, lse: torch.Tensor, at_target: torch.Tensor, total: torch.Tensor
    ) -> torch.Tensor:
        """The loss of each token from its three numbers."""
        settings = self.settings
        loss = (1 - settings.label_smoothing) * (lse - at_target)
        if settings.label_smoothing:
            loss += settings.label_smoothing * (lse - total / self.classes)
        if settings.z_loss:
            loss += settings.z_loss * lse.square()
        return loss.masked_fill_(targets == settings.ignore_index, 0.0)

    def vocabulary(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Rows of the vocabulary, and their weights as operands."""
        for rows in _parts(self.rows, self.settings.vocabulary_chunk):
            yield rows, [self.products.operand(weight[rows]) for weight in self.weights]

    def chunks(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Tokens, and their inputs as operands."""
        for tokens in _parts(self.tokens, self.settings.chunk_tokens):
            yield tokens, [self.products.operand(hidden[tokens]) for hidden in self.hidden]

    def linear(self, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """The tile before the functions."""
        tile = self.products(hidden[0], weights[0].t())
        for x, weight in zip(hidden[1:], weights[1:], strict=True):
            self.products.add(tile, x, weight.t())
        return tile if self.bias is None else tile.add_(self.bias[rows].to(tile.dtype))

    def logits(self, tile: torch.Tensor, rows: slice) -> torch.Tensor:
        """The tile after the functions."""
        offset = self.settings.offset
        for function in self.settings.functions:
            tile = function(tile, slice(rows.start + offset, rows.stop + offset))
        return tile

    def target_columns(self, targets: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The column of each target in the tile, and whether it is in it; both ``[tokens, 1]``."""
        columns = self.columns(targets, rows)
        inside = (columns >= 0) & (columns < rows.stop - rows.start)
        return columns.clamp(0, rows.stop - rows.start - 1).unsqueeze(1), inside.unsqueeze(1)

    def columns(self, targets: torch.Tensor, rows: slice) -> torch.Tensor:
        """The column of each target, counted from the first of the tile; it may be outside of it."""
        return targets - (rows.start + self.settings.offset)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: TileSettings,
        dtype: torch.dtype,
        targets: torch.Tensor,
        bias: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        hidden, weights = tensors[0::2], tensors[1::2]
        products = Products(dtype, hidden[0].device)
        with torch.autocast(hidden[0].device.type, enabled=False):
            tiles = Tiles(settings, products, hidden, weights, bias)
            tiles.check(targets)
            lse, at_target, total = _statistics(tiles, targets)
            loss = tiles.losses(targets, lse, at_target, total)
        ctx.settings, ctx.products = settings, products
        ctx.save_for_backward(targets, lse, bias, *tensors)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        targets, lse, bias, *tensors = ctx.saved_tensors
        settings, products = ctx.settings, ctx.products
        needs_bias, *needs = ctx.needs_input_grad[3:]
        with torch.autocast(gradient.device.type, enabled=False):
            tiles = Tiles(settings, products, tensors[0::2], tensors[1::2], bias)
            by_token = torch.where(targets != settings.ignore_index, gradient, torch.zeros_like(gradient))
            of_hidden, of_weights, of_bias = _gradients(tiles, targets, lse, by_token, needs[0::2], needs[1::2])
            if settings.group is not None:
                for total in of_hidden:
                    if total is not None:
                        dist.all_reduce(total, group=settings.group)
        gradients: list[torch.Tensor | None] = [of_bias if needs_bias else None]
        for x, total, weight in zip(tensors[0::2], of_hidden, of_weights, strict=True):
            gradients += [None if total is None else total.to(x.dtype), weight]
        return (None, None, None, *gradients)


def _statistics(tiles: Tiles, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token: the logarithm of the sum of exp(logits), the logit of the target, the sum of the logits."""
    settings, sums = tiles.settings, tiles.products.sums
    device = tiles.hidden[0].device
    # The largest logit so far; a finite start, so that a tile in which all logits are -inf adds 0.
    largest = torch.full((tiles.tokens,), torch.finfo(sums).min, dtype=sums, device=device)
    exponentials, at_target, total = torch.zeros(3, tiles.tokens, dtype=sums, device=device)
    for rows, weights in tiles.vocabulary():
        for tokens, hidden in tiles.chunks():
            logits = tiles.logits(tiles.linear(hidden, weights, rows), rows)
            if tiles.uses_kernels:
                from ds_trainer.parallel import tile_kernels

                tile_kernels.add_statistics(
                    logits,
                    tiles.columns(targets[tokens], rows),
                    largest[tokens],
                    exponentials[tokens],
                    at_target[tokens],
                    total[tokens] if settings.label_smoothing else None,
                )
                continue
            columns, inside = tiles.target_columns(targets[tokens], rows)
            at_target[tokens] += torch.where(inside, logits.gather(1, columns), 0.0).squeeze(1)
            if settings.label_smoothing:
                total[tokens] += logits.sum(1)
            before = largest[tokens]
            now = torch.maximum(before, logits.amax(1))
            added = logits.sub_(now.unsqueeze(1)).exp_().sum(1)
            exponentials[tokens] = exponentials[tokens] * (before - now).exp() + added
            largest[tokens] = now
    if settings.group is not None:
        own = largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=settings.group)
        exponentials = exponentials * (own - largest).exp()
        both = torch.stack([exponentials, at_target, total])
        dist.all_reduce(both, group=settings.group)
        exponentials, at_target, total = both
    return largest + exponentials.log(), at_target, total


def _gradients(
    tiles: Tiles,
    targets: torch.Tensor,
    lse: torch.Tensor,
    by_token: torch.Tensor,
    needs_hidden: Sequence[bool],
    needs_weight: Sequence[bool],
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None], torch.Tensor | None]:
    """Gradients of the inputs (not rounded, and of this rank's rows alone), the weights and the bias."""
    settings, products, sums = tiles.settings, tiles.products, tiles.products.sums
    of_hidden = [
        torch.zeros(x.shape, dtype=sums, device=x.device) if needed else None
        for x, needed in zip(tiles.hidden, needs_hidden, strict=True)
    ]
    of_weights = [
        torch.empty_like(weight) if needed else None for weight, needed in zip(tiles.weights, needs_weight, strict=True)
    ]
    of_bias = None if tiles.bias is None else torch.empty_like(tiles.bias)
    share = by_token * (1 + 2 * settings.z_loss * lse) if settings.z_loss else by_token
    spread = by_token * (settings.label_smoothing / tiles.classes) if settings.label_smoothing else None
    at_target = (settings.label_smoothing - 1) * by_token
    for rows, weights in tiles.vocabulary():
        sums_of_rows = [
            None if whole is None else torch.zeros(one.shape, dtype=sums, device=one.device)
            for one, whole in zip(weights, of_weights, strict=True)
        ]
        sum_of_bias = torch.zeros(rows.stop - rows.start, dtype=sums, device=lse.device)
        for tokens, hidden in tiles.chunks():
            linear = tiles.linear(hidden, weights, rows)
            of_tokens = [None if one is None else one[tokens] for one in (lse, share, at_target, spread)]
            tile = _gradient_of_tile(tiles, linear, rows, targets[tokens], *of_tokens)
            if of_bias is not None:
                sum_of_bias += tile.sum(0)
            tile = tile.to(products.factor_dtype)
            for index, (x, weight) in enumerate(zip(hidden, weights, strict=True)):
                total = of_hidden[index]
                if total is not None:
                    products.add(total[tokens], tile, weight)
                sum_of_rows = sums_of_rows[index]
                if sum_of_rows is not None:
                    products.add(sum_of_rows, tile.t(), x)
        for whole, part in zip(of_weights, sums_of_rows, strict=True):
            if whole is not None and part is not None:
                whole[rows] = part.to(whole.dtype)
        if of_bias is not None:
            of_bias[rows] = sum_of_bias.to(of_bias.dtype)
    return of_hidden, of_weights, of_bias


def _gradient_of_tile(
    tiles: Tiles,
    linear: torch.Tensor,
    rows: slice,
    targets: torch.Tensor,
    lse: Any,
    share: Any,
    at_target: Any,
    spread: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of ``linear``, which is overwritten; all others are ``[tokens]``."""
    if tiles.uses_kernels:
        from ds_trainer.parallel import tile_kernels

        columns = tiles.columns(targets, rows)
        return tile_kernels.gradient(
            tile=linear,
            columns=columns,
            lse=lse,
            share=share,
            at_target=at_target,
            spread=spread,
            dtype=tiles.products.factor_dtype,
        )
    if tiles.settings.functions:
        with torch.enable_grad():
            logits = tiles.logits(linear.requires_grad_(), rows)
        tile = (logits.detach() - lse.unsqueeze(1)).exp_()
    else:
        tile = linear.sub_(lse.unsqueeze(1)).exp_()
    tile.mul_(share.unsqueeze(1))
    columns, inside = tiles.target_columns(targets, rows)
    tile.scatter_add_(1, columns, torch.where(inside, at_target.unsqueeze(1), 0.0))
    if spread is not None:
        tile.sub_(spread.unsqueeze(1))
    if tiles.settings.functions:
        (tile,) = torch.autograd.grad(logits, linear, tile)
    return tile

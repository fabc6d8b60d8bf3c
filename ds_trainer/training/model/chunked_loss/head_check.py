"""Verifies the loss in tiles on the first batch of a run: a sample of its tokens is computed without tiles.

Compared are the loss of each token of the sample, as it was computed with all other tokens, and the gradients of the
sample's inputs, weights and bias, computed with several tiles. The sample has the tokens on both sides of the borders
between chunks. It is at most a quarter of them, and its logits take at most 64 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ds_trainer.parallel.linear_cross_entropy import TileSettings, linear_cross_entropy
from ds_trainer.parallel.one_pass_cross_entropy import one_pass_cross_entropy
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.two_runs import ratio, relative_difference

_LOGITS = 2**24  # in the sample
_ROWS = 8192  # of the weight, cast together
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_TOLERANCE_HALF = 3e-2
_TOLERANCE_GPU = 3e-3  # products of float32 matrices in TF32

_REMEDY = (
    "Set loss_chunk_tokens=0 (and z_loss_factor=0) to compute the loss from whole logits, and report this, with the "
    "model."
)


def check_tiles(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    settings: TileSettings,
    losses: torch.Tensor,
    one_pass: bool,
) -> None:
    """Compare ``losses``, the result for the other arguments in tiles or in one pass, with plain PyTorch.

    Waits for the device. With a partitioned vocabulary, collective over its group.

    Raises:
        ConfigError: a loss or a gradient differs by more than rounding; with the largest difference.
    """
    tokens, rows = terms[0][0].shape[0], terms[0][1].shape[0]
    classes = settings.classes or rows
    limit = max(8, min(_LOGITS // classes, tokens // 4))
    sample = sampled_tokens(tokens, settings.chunk_tokens, limit).to(targets.device)
    inputs = [(x.detach()[sample], weight.detach()) for x, weight in terms]
    own_bias = None if bias is None else bias.detach()
    chosen = targets[sample]
    plain = _PlainLoss(inputs, own_bias, chosen, settings)
    with torch.enable_grad():
        leaves = [(x.clone().requires_grad_(), weight.detach().requires_grad_()) for x, weight in inputs]
        leaf = None if own_bias is None else own_bias.detach().requires_grad_()
        few = replace(settings, chunk_tokens=max(1, len(sample) // 3), vocabulary_chunk=rows // 3 + 1)
        if one_pass:
            total, again = one_pass_cross_entropy(leaves, leaf, chosen, few)
        else:
            again = linear_cross_entropy(leaves, leaf, chosen, few)
            total = again.sum()
        tensors = [one for pair in leaves for one in pair] + ([] if leaf is None else [leaf])
        gradients = torch.autograd.grad(total, tensors)
    differences = {
        "the loss of a token": _largest_difference(losses.detach()[sample], plain.losses),
        "the loss of a token of a sample": _largest_difference(again.detach(), plain.losses),
        "a gradient of the head": plain.gradient_difference(gradients),
    }
    allowed = _TOLERANCE.get(terms[0][0].dtype, _TOLERANCE_HALF)
    if torch.is_autocast_enabled(losses.device.type):
        allowed = max(allowed, _TOLERANCE_HALF)
    elif losses.device.type != "cpu":
        allowed = max(allowed, _TOLERANCE_GPU)
    for what, difference in differences.items():
        if not difference <= allowed:
            raise ConfigError(
                f"The loss in chunks of {settings.chunk_tokens} tokens differs from the loss of whole logits on the "
                f"first batch: {what} by a relative {difference:.2g} (rounding allows {allowed:.0e}). {_REMEDY}"
            )


def sampled_tokens(tokens: int, chunk: int, limit: int) -> torch.Tensor:
    """Indices of at most ``limit`` of ``tokens``: on both sides of the borders of chunks first, then evenly spread."""
    borders = [place for border in range(chunk, tokens, chunk) for place in (border - 1, border)]
    if len(borders) > limit // 2:  # some from the whole length, each with both sides
        step = -(-len(borders) // max(2, limit // 2) // 2) * 2
        borders = [place for start in range(0, len(borders), max(2, step)) for place in borders[start : start + 2]]
    spread = torch.linspace(0, max(0, tokens - 1), min(tokens, max(2, limit - len(borders)))).long().tolist()
    return torch.tensor(sorted({*borders[:limit], *spread}), dtype=torch.long)


class _PlainLoss:
    """Losses of tokens from their whole logits, in float32 or float64; weights are cast in parts.

    Attributes:
        losses: the loss of each token.
    """

    def __init__(
        self,
        terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: TileSettings,
    ) -> None:
        self._dtype = torch.float64 if terms[0][0].dtype == torch.float64 else torch.float32
        self._terms, self._has_bias, self._group = terms, bias is not None, settings.group
        rows = terms[0][1].shape[0]
        self._parts = [slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS)]
        first, last = settings.offset, settings.offset + rows
        with torch.autocast(targets.device.type, enabled=False):
            logits = torch.zeros(len(targets), settings.classes or rows, dtype=self._dtype, device=targets.device)
            own = logits[:, first:last]
            for x, weight in terms:
                for part in self._parts:
                    own[:, part] += x.to(self._dtype) @ weight[part].to(self._dtype).t()
            if bias is not None:
                own += bias.to(self._dtype)
            if settings.group is not None:
                dist.all_reduce(logits, group=settings.group)
            with torch.enable_grad():
                final = logits.requires_grad_()
                for function in settings.functions:
                    final = function(final, slice(0, final.shape[1]))
                losses = F.cross_entropy(
                    final,
                    targets,
                    ignore_index=settings.ignore_index,
                    reduction="none",
                    label_smoothing=settings.label_smoothing,
                )
                if settings.z_loss:
                    squares = settings.z_loss * final.logsumexp(1).square()
                    losses = losses + torch.where(targets != settings.ignore_index, squares, 0.0)
                (of_logits,) = torch.autograd.grad(losses.sum(), logits)
        self.losses = losses.detach()
        self._of_logits = of_logits[:, first:last]

    def gradient_difference(self, gradients: Sequence[torch.Tensor]) -> float:
        """The largest relative difference (of norms) of the gradients of inputs, weights and bias."""
        differences = [0.0]
        with torch.autocast(self.losses.device.type, enabled=False):
            for index, (x, weight) in enumerate(self._terms):
                of_input = torch.zeros(x.shape, dtype=self._dtype, device=x.device)
                wrong = size = torch.zeros((), dtype=torch.float64, device=x.device)
                for part in self._parts:
                    of_part = self._of_logits[:, part]
                    of_input += of_part @ weight[part].to(self._dtype)
                    of_weight = (of_part.t() @ x.to(self._dtype)).double()
                    wrong = wrong + (gradients[2 * index + 1][part].double() - of_weight).square().sum()
                    size = size + of_weight.square().sum()
                if self._group is not None:
                    dist.all_reduce(of_input, group=self._group)
                differences += [
                    relative_difference(gradients[2 * index], of_input),
                    ratio(wrong.sqrt(), size.sqrt()),
                ]
            if self._has_bias:
                differences.append(relative_difference(gradients[-1], self._of_logits.sum(0)))
        return max(differences)


def _largest_difference(losses: torch.Tensor, expected: torch.Tensor) -> float:
    return ratio((losses.double() - expected.double()).abs().max(), expected.double().abs().max())

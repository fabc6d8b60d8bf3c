"""Random numbers of samples: a sample draws the same ones alone, in a part of its batch, and in all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SIZED = {"aten::rand", "aten::randn"}
_LIKE = {"aten::rand_like", "aten::randn_like", "aten::randint_like"}
_IN_PLACE = {"aten::uniform_", "aten::normal_", "aten::exponential_", "aten::log_normal_", "aten::random_"}


class DrawsOfSamples:
    """How many rows of each random tensor belong to a sample: found in a pass over all samples, for those over parts.

    Args:
        samples: number of all samples.

    Attributes:
        rows: for each draw of that pass, the rows of a sample; 0 if its first dimension is not one of samples.
        fits: whether all parts drew like that. If not, no draw is of samples.
        drawn, hidden: whether numbers were drawn here, and whether by a kernel that cannot be told what to draw.
    """

    def __init__(self, samples: int) -> None:
        self.samples, self.fits = samples, True
        self.drawn = self.hidden = False
        self.rows: list[int] = []
        self.seed = torch.initial_seed() % 2**31

    def of(self, samples: Sequence[int]) -> RandomOfSamples:
        """Context of a pass over ``samples`` of them; the first one is over all."""
        return RandomOfSamples(self, list(samples))

    def by_row(self) -> DrawsOfSamples:
        """The same, where each row of a random tensor has the same numbers."""
        return DrawsOfSamples(0)


class RandomOfSamples(TorchDispatchMode):
    """Inside, random tensors have the numbers of the samples. So a model that draws for each sample (dropout, masked
    autoencoders, diffusion) gives it the same loss in every batch. Permutations are reversed orders.
    """

    def __init__(self, draws: DrawsOfSamples, samples: list[int]) -> None:
        super().__init__()
        self._all, self._samples, self._draws = draws, samples, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, overload = func._schema.name, func._schema.overload_name
        if name in _SIZED or (name == "aten::randint" and overload in ("", "low")):
            place = 0 if name in _SIZED else 1 + (overload == "low")
            return self._drawn(args[place], lambda size: func(*args[:place], size, *args[place + 1 :], **kwargs))
        if name == "aten::randperm":
            return func(*args, **kwargs).sort(descending=True).values
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None:
            return func(*args, **kwargs)
        if name in _LIKE:
            return self._drawn(first.shape, lambda size: func(first.new_empty(size), *args[1:], **kwargs))
        if name == "aten::native_dropout" and args[2]:  # of CUDA; the CPU's is made of the others
            kept = self._drawn(first.shape, lambda size: func(first.new_ones(size), *args[1:], **kwargs)[0])
            return first * kept, kept != 0
        if name in _IN_PLACE or (name == "aten::bernoulli_" and overload == "float"):
            return first.copy_(self._drawn(first.shape, lambda size: func(first.new_empty(size), *args[1:], **kwargs)))
        if name in ("aten::bernoulli", "aten::bernoulli_"):  # of a tensor of probabilities
            chance = args[1] if len(args) > 1 else first
            drawn = (self._uniform(first) < chance).to(first.dtype)
            return drawn if name == "aten::bernoulli" else first.copy_(drawn)
        if name == "aten::multinomial":  # the largest of logits with Gumbel's noise
            noise = -(-self._uniform(first).log()).log()
            return (first.log() + noise).topk(args[1], -1).indices
        self._all.hidden |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **kwargs)

    def _uniform(self, like: torch.Tensor) -> torch.Tensor:
        return self._drawn(like.shape, lambda size: torch.rand(size, device=like.device))

    def _drawn(self, size: Sequence[int], draw: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        """The numbers of the samples in a tensor of ``size``; ``draw`` makes a tensor of a size."""
        draws, index, samples = self._all, self._draws, len(self._samples)
        self._draws += 1
        draws.drawn = True
        torch.manual_seed(draws.seed + self._draws)  # the numbers must not depend on how many earlier draws took
        if not len(size) or not size[0]:
            return draw(list(size))
        if samples == draws.samples:
            draws.rows.append(size[0] // samples if size[0] % samples == 0 else 0)
        rows = draws.rows[index] if index < len(draws.rows) else 0
        if rows * samples != size[0]:
            draws.fits = draws.fits and rows == 0
            return draw([1, *size[1:]]).expand(tuple(size)).contiguous()
        whole = draw([draws.samples * rows, *size[1:]])
        return whole.reshape(draws.samples, rows, *size[1:])[self._samples].reshape(tuple(size))

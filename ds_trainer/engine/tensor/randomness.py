"""Random numbers of tensor-parallel ranks: the same where a tensor is whole, others where it is sliced.

The ranks of a tensor-parallel group run with the same state of the default generators. Between a column-parallel and
the next row-parallel layer each rank works on values that only it has (its heads, its part of the MLP): there the
generators are seeded anew from a common draw and the rank, and afterwards put back to where the draw has left them.

So there is no state besides that of the default generators: checkpoints keep it, and a recomputation, which begins
with the state that its forward pass began with, draws the same masks. That a region is entered or left is read off the
generator's seed, since a recomputation may stop in the middle of a region.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.groups import ParallelGroups

_SEEDS = 2**62
_STRIDE = 0x1E3779B97F4A7C15  # odd: places far apart for neighbouring ranks


def dropout_names(model: nn.Module) -> list[str]:
    """Modules of ``model`` that drop something: ``nn.Dropout``, and attributes named like it, with a rate above 0."""
    found = []
    for name, module in model.named_modules():
        rates = [(key, value) for key, value in vars(module).items() if "drop" in key]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(("p", module.p))
        found += [f"{name}.{key}" for key, rate in rates if isinstance(rate, float) and rate > 0.0]
    return found


class SlicedRegion:
    """The generators between a column- and a row-parallel layer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seed: int | None = None
        self._outside: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def enter(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """After a column-parallel layer."""
        if not module.training or torch.initial_seed() == self._seed:
            return
        drawn = int(torch.randint(_SEEDS, (), dtype=torch.int64))
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._outside = (torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None)
        self._seed = (drawn + (self._rank + 1) * _STRIDE) % _SEEDS
        torch.manual_seed(self._seed)

    def leave(self, module: nn.Module, arguments: Any) -> None:
        """Before a row-parallel layer."""
        if self._outside is None or torch.initial_seed() != self._seed:
            return
        on_host, on_gpu = self._outside
        torch.set_rng_state(on_host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)


def separate_randomness(model: nn.Module, groups: ParallelGroups) -> None:
    """Give the sliced parts of ``model`` random numbers of their own on each tensor-parallel rank."""
    from deepspeed.module_inject import layers

    if not dropout_names(model):
        return
    region = SlicedRegion(groups.place.tp)
    for module in model.modules():
        if isinstance(module, (layers.LinearAllreduce, layers.SubParamLinearAllreduce)):
            module.register_forward_pre_hook(region.leave)
        elif isinstance(module, (layers.LinearLayer, layers.SubParamLinearLayer)):
            gathered = getattr(module, "gather_output", False) or isinstance(module, layers.VocabParallelLinear)
            if not gathered:
                module.register_forward_hook(region.enter)

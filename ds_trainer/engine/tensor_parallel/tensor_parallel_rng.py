"""Random numbers of tensor-parallel ranks: equal for replicated activations, different for partitioned ones.

The ranks of a tensor-parallel group run with the same state of the default generators. Between a column-parallel and
the next row-parallel layer each rank works on different values (its heads, its part of the MLP): there the generators
are reseeded from a common draw and the rank, and afterwards restored to their state after the draw.

So there is no state other than that of the default generators: checkpoints save it, and a recomputation, which starts
with the state of its forward pass, draws the same masks. The generator's seed tells whether a region is active, because
a recomputation may stop in the middle of a region.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.parallel.groups import ParallelGroups

_SEEDS = 2**62
_STRIDE = 0x1E3779B97F4A7C15  # odd: distant seeds for neighboring ranks


def dropout_names(model: nn.Module) -> list[str]:
    """Names of dropouts in ``model``: ``nn.Dropout`` modules and attributes named like it, with a rate above 0."""
    found = []
    for name, module in model.named_modules():
        rates = [(key, value) for key, value in vars(module).items() if "drop" in key]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(("p", module.p))
        found += [f"{name}.{key}" for key, rate in rates if isinstance(rate, float) and rate > 0.0]
    return found


class SlicedRegion:
    """Switches the generators between a column- and a row-parallel layer."""

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
    """Makes the partitioned parts of ``model`` draw different random numbers on each tensor-parallel rank."""
    from deepspeed.module_inject import layers

    if not dropout_names(model):
        return
    region = SlicedRegion(groups.coordinates.tp)
    for module in model.modules():
        if isinstance(module, (layers.LinearAllreduce, layers.SubParamLinearAllreduce)):
            module.register_forward_pre_hook(region.leave)
        elif isinstance(module, (layers.LinearLayer, layers.SubParamLinearLayer)):
            gathered = getattr(module, "gather_output", False) or isinstance(module, layers.VocabParallelLinear)
            if not gathered:
                module.register_forward_hook(region.enter)

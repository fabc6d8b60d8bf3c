"""Runs a model for its results only: afterwards model and random generators are as before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ds_trainer.utils.plain_attributes import plain_attributes_restored
from ds_trainer.utils.seeds import random_state, restore_random_state

LARGEST = 2**24
"""Entries of a buffer; larger ones hold weights (quantized layers), which no forward pass changes."""


class KeptBuffers:
    """The buffers of some modules, to put back: their values and sizes, and which there are.

    Args:
        modules: the modules.
        largest: buffers with more entries are not copied: in-place changes of these stay.
    """

    def __init__(self, modules: Iterable[nn.Module], largest: int | None = None) -> None:
        self._kept = [(module._buffers, _copies(module._buffers, largest)) for module in modules]

    def restore(self) -> None:
        """Put them back."""
        for buffers, kept in self._kept:
            for name in buffers.keys() - kept.keys():
                del buffers[name]
            for name, (buffer, version, copy) in kept.items():
                buffers[name] = buffer
                if buffer is None or copy is None:
                    continue
                # Batch normalization writes its statistics without a new version.
                if buffer._version != version or not torch.equal(buffer, copy):
                    with torch.no_grad():
                        buffer.copy_(copy)


def _copies(
    buffers: Mapping[str, torch.Tensor | None], largest: int | None
) -> dict[str, tuple[torch.Tensor | None, int, torch.Tensor | None]]:
    return {
        name: (None, 0, None)
        if buffer is None
        else (
            buffer,
            buffer._version,
            buffer.detach().clone() if largest is None or buffer.numel() <= largest else None,
        )
        for name, buffer in buffers.items()
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers and plain attributes of the modules of ``model`` (counters) are as before."""
    modules = list(model.modules())
    kept = KeptBuffers(modules, LARGEST)
    with plain_attributes_restored(*modules):
        try:
            yield
        finally:
            kept.restore()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode, without gradients.

    Afterwards modes, buffers, plain attributes of modules (counters) and random generators are as before.
    """
    random = random_state()
    with unchanged(model):
        try:
            with evaluation_mode(model), torch.no_grad():
                yield
        finally:
            restore_random_state(random)


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Afterwards each module of ``model`` is in the mode from before: training or evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, all modules of ``model`` are in evaluation mode; afterwards each has its mode from before."""
    with modes_restored(model):
        model.eval()
        yield


def train_but_for_noise(model: nn.Module) -> None:
    """Put ``model`` in training mode, without dropout modules and layers that would use the statistics of a batch."""
    model.train()
    for module in model.modules():
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)):
            module.training = False

"""Runs a model for its results only: afterwards model and random generators are as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ds_trainer.utils.plain_attributes import plain_attributes_restored
from ds_trainer.utils.seeds import random_state, restore_random_state

_LARGEST = 2**24  # entries of a buffer; larger ones hold weights (quantized layers), which no forward pass changes


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is in evaluation mode, without gradients.

    Afterwards modes, buffers, plain attributes of modules (counters) and random generators are as before.
    """
    modules, random = list(model.modules()), random_state()
    modes = [module.training for module in modules]
    kept = [(buffer, buffer._version, buffer.clone()) for buffer in model.buffers() if buffer.numel() <= _LARGEST]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(plain_attributes_restored(module))
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            with torch.no_grad():
                for buffer, version, copy in kept:
                    if buffer._version != version:
                        buffer.copy_(copy)
            restore_random_state(random)


def train_but_for_statistics(model: nn.Module) -> None:
    """Put ``model`` in training mode, without layers that would use the statistics of a batch."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False

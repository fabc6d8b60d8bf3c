"""The persistent buffers of a model, which may grow, appear and vanish while it trains: memory banks, caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from ds_trainer.utils.errors import listed
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of each persistent buffer, by name."""


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers of the model, each once."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def buffer_shapes(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each persistent buffer of ``model`` now, by name."""
    return {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in persistent_buffers(model)}


def match_buffers(model: torch.nn.Module, wanted: Shapes, exclude: Collection[str] = ()) -> set[str]:
    """Gives the model the buffers of a source, without values: memory banks grow, caches appear in a forward pass.

    Returns the names of buffers that the source lacks; they keep their values.
    """
    present = dict(persistent_buffers(model))
    for name, (shape, dtype) in wanted.items():
        owner, _, own_name = name.rpartition(".")
        module = dict(model.named_modules()).get(owner)
        buffer = present.pop(name, None)
        if buffer is not None and tuple(buffer.shape) == tuple(shape):
            continue
        if module is None or (buffer is None and hasattr(module, own_name) and own_name not in module._buffers):
            continue  # another model
        device = next((tensor.device for tensor in (*present.values(), *model.parameters())), None)
        module.register_buffer(own_name, torch.empty(tuple(shape), dtype=dtype, device=device))
    lacking = sorted(present.keys() - set(exclude))
    if lacking:
        logger.warning("The checkpoint has no buffers %s: they keep their initial values.", listed(lacking, 8))
    return set(present)

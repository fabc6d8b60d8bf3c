"""Weight sources: provide the weights of a model whose parameters are on the meta device.

A model on meta has names, shapes and dtypes and takes no memory. Its *weight source* provides the elements of any shard
of any parameter, so that a rank reads no more than it will hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils.errors import ConfigError

_ATTRIBUTE = "_ds_trainer_weight_source"


@runtime_checkable
class WeightSource(Protocol):
    """Provides the elements of parameters and persistent buffers.

    Names are those of ``model.named_parameters()`` and ``model.named_buffers()``; a tied weight uses its first name.
    """

    def has(self, name: str) -> bool:
        """Whether the source provides this tensor."""

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Write ``len(shard_slice)`` elements of the tensor to ``target``.

        Args:
            name: a tensor for which :meth:`has` is true.
            shard_slice: the elements; its ``shape`` is the full shape of the tensor.
            target: flat, contiguous, ``[len(shard_slice)]``, on any device; elements are cast to its dtype.

        Raises:
            ConfigError: the shape of the tensor in the source differs.
        """


class ChainedSource:
    """Combines several sources: each tensor comes from the first source that has it."""

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        self.sources = list(sources)

    def _find(self, name: str) -> WeightSource | None:
        return next((source for source in self.sources if source.has(name)), None)

    def has(self, name: str) -> bool:
        """Whether this source holds the tensor."""
        return self._find(name) is not None

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Write the elements of a shard into ``target``."""
        source = self._find(name)
        if source is None:
            raise ConfigError(f"No weight source provides {name}.")
        source.fill(name, shard_slice, target)


def attach_weight_source(model: nn.Module, source: WeightSource) -> None:
    """Set the weight source of ``model``, which is on meta."""
    object.__setattr__(model, _ATTRIBUTE, source)


def attached_weight_source(model: nn.Module) -> WeightSource | None:
    """Returns the source set by :func:`attach_weight_source`; None if there is none."""
    return getattr(model, _ATTRIBUTE, None)

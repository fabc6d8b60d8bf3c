"""Where the numbers of a model come from whose parameters are on the meta device.

A model on meta has names, shapes and types and takes no memory. Its *weight source* gives the elements of any shard of
any parameter, so that a rank asks for no more than it will hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from ds_trainer.parallel.places import Place
from ds_trainer.utils.errors import ConfigError

_ATTRIBUTE = "_ds_trainer_weight_source"


@runtime_checkable
class WeightSource(Protocol):
    """Gives the elements of parameters and persistent buffers.

    Names are those of ``model.named_parameters()`` and ``model.named_buffers()``; a tied weight has its first name.
    """

    def has(self, name: str) -> bool:
        """Whether it knows this tensor."""

    def fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        """Write ``len(place)`` elements of the tensor into ``target``.

        Args:
            name: of a tensor that it :meth:`has`.
            place: which elements; its ``shape`` is that of the whole tensor.
            target: flat, contiguous, ``[len(place)]``, on any device, of the type that the engine wants; elements of
                another type are converted.

        Raises:
            ConfigError: the tensor has another shape there.
        """


class FirstThatHas:
    """Several sources as one: each tensor comes from the first that has it."""

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        self.sources = list(sources)

    def _of(self, name: str) -> WeightSource | None:
        return next((source for source in self.sources if source.has(name)), None)

    def has(self, name: str) -> bool:
        return self._of(name) is not None

    def fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        source = self._of(name)
        if source is None:
            raise ConfigError(f"Nothing says what the weights of {name} are.")
        source.fill(name, place, target)


def attach_weights(model: nn.Module, source: WeightSource) -> None:
    """Say where the weights of ``model``, which is on meta, come from."""
    object.__setattr__(model, _ATTRIBUTE, source)


def attached_weights(model: nn.Module) -> WeightSource | None:
    """What :func:`attach_weights` said; None for a model that has its weights, or that nobody said anything of."""
    return getattr(model, _ATTRIBUTE, None)

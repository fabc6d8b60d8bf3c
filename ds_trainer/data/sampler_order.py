"""Orders of epochs that a user's sampler yields."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from ds_trainer.data.order import Order, StoredOrder
from ds_trainer.utils.errors import ConfigError


class SamplerOrder:
    """The order of each epoch: what the sampler yields when it is iterated for the n-th time.

    The result depends on sampler, seed and epoch alone, so that a resumed run and all ranks have the same one. A
    sampler with ``set_epoch`` is told the epoch. Any other one is a copy of the given one that is iterated once for
    each earlier epoch, so that a generator of its own has the same state as in an uninterrupted run.

    Args:
        sampler: yields dataset positions.
    """

    def __init__(self, sampler: Any) -> None:
        self._given = sampler
        self._current = copy.deepcopy(sampler)
        self._iterated = 0

    def __call__(self, epoch: int, ordered_for: int | None = None, seed: int = 0) -> Order:
        """The order of an epoch.

        Args:
            epoch: counted from 0.
            ordered_for: ignored: a sampler does not depend on the batch size.
            seed: of the global random numbers while the sampler is iterated, which some samplers use.

        Raises:
            ConfigError: the number of positions is not the length of the sampler.
        """
        if callable(getattr(self._current, "set_epoch", None)):
            self._current.set_epoch(epoch)
            self._iterated = epoch
        elif epoch < self._iterated:
            self._current, self._iterated = copy.deepcopy(self._given), 0
        positions = np.empty(0, np.int64)
        for number in range(self._iterated, epoch + 1):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + number)
                # Eight bytes a position; a list of them would take 40.
                positions = np.fromiter((int(position) for position in self._current), np.int64)
        self._iterated = epoch + 1
        if len(positions) != len(self._current):
            raise ConfigError(
                f"The sampler, a {type(self._given).__name__}, has length {len(self._current)} and yielded "
                f"{len(positions)} positions; both must be equal."
            )
        return StoredOrder(positions)

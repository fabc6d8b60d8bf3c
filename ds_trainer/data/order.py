"""Orders of the samples of an epoch, with random access.

Up to :data:`STORED_UP_TO` samples an order is a permutation drawn by torch and stored in memory. For more samples, each
position is computed and no memory is needed: a Feistel network over the two digits of a sample's number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ds_trainer.utils.errors import ConfigError

Positions = npt.NDArray[np.int64]

STORED_UP_TO = 2**20
"""Largest number of samples whose permutation is drawn by torch and stored: 8 MiB and about 20 ms per epoch."""

_ROUNDS = 8  # 4 are pseudo-random (Luby and Rackoff, 1988); the digits are short, so twice as many
_MASK = 2**64 - 1


class Order(Protocol):
    """A sequence of positions in a dataset."""

    def __len__(self) -> int:
        """Number of positions."""

    def at(self, indices: Positions) -> Positions:
        """The dataset positions at ``indices``: int64, of the same shape."""


class DatasetOrder:
    """The dataset's own order.

    Args:
        samples: length of the dataset.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def at(self, indices: Positions) -> Positions:
        """``indices`` themselves."""
        return indices


class StoredOrder:
    """An order in memory.

    Args:
        positions: all of them, int64 ``[samples]``.
    """

    def __init__(self, positions: Positions) -> None:
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    def at(self, indices: Positions) -> Positions:
        """The dataset positions at ``indices``."""
        return self._positions[indices]

    def indices_of(self, positions: Positions) -> Positions:
        """The indices of ``positions`` in this order."""
        indices = np.empty_like(self._positions)
        indices[self._positions] = np.arange(len(indices))
        return indices[positions]


class ComputedPermutation:
    """A pseudo-random permutation of ``range(samples)`` that is computed, not stored.

    A number is written with two digits in the bases ``a`` and ``b``, where ``a`` is about the square root of the number
    of samples and ``a * b`` is the smallest product that covers them. In every round a keyed hash of one digit is added
    to the other one, which is invertible whatever the hash (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    2002). Results outside ``range(samples)``, less than one in ``sqrt(samples)``, go through the network again.

    Args:
        samples: number of samples, less than ``2**60``.
        seed, epoch: the permutation depends on these alone, in every process and on every machine.
    """

    def __init__(self, samples: int, seed: int, epoch: int) -> None:
        self._samples = samples
        root = math.isqrt(max(0, samples - 1)) + 1
        self._bases = (root, max(1, -(-samples // root)))
        key = _mixed(_mixed(seed & _MASK) + epoch)
        self._keys = [np.uint64(_mixed(key + index)) for index in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._samples

    def at(self, indices: Positions) -> Positions:
        """The dataset positions at ``indices``."""
        return self._walk(indices, self._forward)

    def indices_of(self, positions: Positions) -> Positions:
        """The indices of ``positions`` in this order."""
        return self._walk(positions, self._backward)

    def _walk(self, numbers: Positions, step: Callable[[Positions], Positions]) -> Positions:
        walked = step(np.asarray(numbers, np.int64))
        while len(outside := np.flatnonzero(walked >= self._samples)):
            walked[outside] = step(walked[outside])
        return walked

    def _forward(self, numbers: Positions) -> Positions:
        digits = [numbers // self._bases[1], numbers % self._bases[1]]
        for index in range(_ROUNDS):
            self._turn(digits, index, 1)
        return digits[0] * self._bases[1] + digits[1]

    def _backward(self, numbers: Positions) -> Positions:
        digits = [numbers // self._bases[1], numbers % self._bases[1]]
        for index in reversed(range(_ROUNDS)):
            self._turn(digits, index, -1)
        return digits[0] * self._bases[1] + digits[1]

    def _turn(self, digits: list[Positions], index: int, sign: int) -> None:
        turned = index % 2
        base = self._bases[turned]
        # The upper 32 bits of the hash as a fraction of the base: both are below 2**32.
        drawn = _hashed(digits[1 - turned].astype(np.uint64) + self._keys[index]) >> np.uint64(32)
        drawn = (drawn * np.uint64(base)) >> np.uint64(32)
        digits[turned] = (digits[turned] + sign * drawn.astype(np.int64)) % base


def _hashed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mixed(value: int) -> int:
    """The next output of SplitMix64 in the state ``value``, as a Python integer."""
    return int(_hashed(np.array([(value + 0x9E3779B97F4A7C15) & _MASK], np.uint64))[0])


def shuffled(samples: int, seed: int, epoch: int) -> StoredOrder | ComputedPermutation:
    """The random order of an epoch.

    Up to :data:`STORED_UP_TO` samples it is the permutation that accelerate's seedable sampler draws (a generator
    seeded with ``seed + epoch``), so that a script ported from transformers sees the same batches.
    """
    if samples > STORED_UP_TO:
        return ComputedPermutation(samples, seed, epoch)
    return StoredOrder(torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).numpy())


def epoch_order(samples: int, seed: int, epoch: int, shuffle: bool) -> Order:
    """The order of ``epoch``: :func:`shuffled`, or the dataset's own order."""
    return shuffled(samples, seed, epoch) if shuffle else DatasetOrder(samples)


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
            seed: seeds the global random numbers while the sampler is iterated, which some samplers use.

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

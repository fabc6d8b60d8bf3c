"""``Mixture``: several datasets as one, with weights.

An epoch has as many samples as all sources together. Of these, each source gives a number in proportion to its weight,
rounded. A source draws its own samples in a random order, one pass after the other: where its part of an epoch is
larger than the source, samples are repeated, and where it is smaller, the next epoch goes on where this one ended. So
no sample comes for the (n+1)-th time before every other one of its source came n times.

The index of a sample says all: the source, and the number of the draw. So order, resuming and layouts are those of any
map-style dataset, and nothing of the length of an epoch is in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from ds_trainer.data.order import ComputedPermutation, StoredOrder, shuffled
from ds_trainer.data.source_ids import with_source
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted


class Mixture(Dataset[Any]):
    """Samples of several datasets.

    Args:
        datasets: map-style datasets.
        weights: relative probabilities of a sample to come from each; None: all samples of all, each once per epoch.
        seed: decides the order in which a source is drawn from.
        new_samples: whether an epoch goes on where the epoch before ended; False: all epochs have the samples of the
            first one, for what is made once from their lengths (packing, ``group_by_length``).
        numbered: whether samples, mappings with ``input_ids``, carry the number of their source
            (:mod:`ds_trainer.data.source_ids`).

    Raises:
        ConfigError: a dataset is empty, or gets no sample because of its weight.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        names: Sequence[str] = (),
        seed: int = 0,
        new_samples: bool = True,
        numbered: bool = False,
    ) -> None:
        self.datasets = list(datasets)
        self.names = list(names) or [str(index) for index in range(len(self.datasets))]
        self.seed = seed
        self._new_samples = new_samples
        self.source_names = tuple(self.names) if numbered else None
        """The names of the sources by the number that samples carry; None if they carry none."""
        sizes = [len(dataset) for dataset in self.datasets]
        empty = [name for name, size in zip(self.names, sizes, strict=True) if size == 0]
        if empty:
            raise ConfigError(f"The sources {', '.join(empty)} have no sample.")
        self.weighted = weights is not None
        self.samples = sizes if weights is None else parts(sum(sizes), weights)
        """Samples of each source in an epoch."""
        if 0 in self.samples:
            name = self.names[self.samples.index(0)]
            raise ConfigError(f"The source {name} gets none of {counted(sum(sizes), 'sample')}; raise its weight.")
        self._ends = list(accumulate(self.samples))
        # Shared, so that data loader workers that outlive an epoch see the next one.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._passes: dict[tuple[int, int], StoredOrder | ComputedPermutation] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samples that are read next, counted from 0."""
        self._epoch[0] = epoch if self._new_samples else 0

    def locate(self, index: int, epoch: int | None = None) -> tuple[int, int]:
        """The source of sample ``index`` of an epoch (default: the one that is set), and its position in that source.

        Raises:
            IndexError: an epoch has no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = bisect_right(self._ends, index)
        inside = index - (self._ends[source] - self.samples[source])
        if not self.weighted:
            return source, inside
        size = len(self.datasets[source])
        draw = inside + (int(self._epoch[0]) if epoch is None else epoch) * self.samples[source]
        order = self._order(source, draw // size)
        return source, int(order.at(np.array([draw % size]))[0])

    def __getitem__(self, index: int) -> Any:
        source, position = self.locate(index)
        sample = self.datasets[source][position]
        return sample if self.source_names is None else with_source(sample, source)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every sample of the epoch that is set, int32 ``[samples]``, from ``lengths`` of the datasets."""
        known = []
        for source, (dataset, samples) in enumerate(zip(self.datasets, self.samples, strict=True)):
            own = getattr(dataset, "lengths", None)
            lengths = np.asarray([len(row["input_ids"]) for row in dataset] if own is None else own, np.int32)
            known.append(lengths[self._positions(source, samples)] if self.weighted else lengths)
        return np.concatenate(known)

    def _positions(self, source: int, samples: int) -> npt.NDArray[np.int64]:
        size = len(self.datasets[source])
        draws = np.arange(samples) + int(self._epoch[0]) * samples
        turns = draws // size
        return np.concatenate([self._order(source, int(t)).at(draws[turns == t] % size) for t in np.unique(turns)])

    def _order(self, source: int, turn: int) -> StoredOrder | ComputedPermutation:
        """The order of pass ``turn`` over a source. The last two of each source are kept: a part may end within one."""
        key = (source, turn)
        if key not in self._passes:
            old = sorted(other for other in self._passes if other[0] == source)
            if len(old) > 1:
                del self._passes[old[0] if turn > old[0][1] else old[1]]
            self._passes[key] = shuffled(len(self.datasets[source]), self.seed + 1_000_003 * (source + 1), turn)
        return self._passes[key]

    def repeats(self, epochs: float = 1.0) -> list[float]:
        """How often a sample of each source is seen in ``epochs`` epochs, on average."""
        pairs = zip(self.samples, self.datasets, strict=True)
        return [epochs * samples / len(dataset) for samples, dataset in pairs]

    def describe(self, epochs: float = 1.0) -> list[str]:
        """One line for each source: its part of an epoch, and how often its samples are seen."""
        rows = zip(self.names, self.samples, self.datasets, self.repeats(epochs), strict=True)
        return [
            f"{name}: {samples:,} of {counted(len(self), 'sample')} of an epoch ({samples / len(self):.1%}), from "
            f"{len(dataset):,}; each is seen {times:.2f} times in {epochs:g} epochs"
            for name, samples, dataset, times in rows
        ]


def parts(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` divided in proportion to ``weights``, by largest remainders: the parts add up to ``total``."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    rounded = [int(value) for value in exact]
    by_remainder = sorted(range(len(rounded)), key=lambda index: (rounded[index] - exact[index], index))
    for index in by_remainder[: total - sum(rounded)]:
        rounded[index] += 1
    return rounded

"""``MixtureStream``: sources that are too large to be prepared, read and encoded while a training runs, with weights.

The source of the n-th sample follows from the seed and n alone. A source is read without end, one pass over its files
after the other. In each pass the files come in another order, and ``window`` records at a time are read, encoded and
shuffled. So the position in a stream is a few numbers per source, and a resumed run reads the samples that the unbroken
run would have read. To get there it skips whole files, reads the records of one file of each source without encoding
them, and encodes one window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ds_trainer.data.source_ids import with_source
from ds_trainer.samples.sources.record import BadLine, BadLines, Policy, Record
from ds_trainer.samples.sources.source import Source, read_file
from ds_trainer.utils.errors import ConfigError

WINDOW = 1000
"""Records that are shuffled together."""
_DRAWS = 1024  # whose sources are computed together
_START = {"turn": 0, "file": 0, "record": 0, "taken": 0}


class Encoding(Protocol):
    """What a record became."""

    @property
    def samples(self) -> Sequence[Any]:
        """Mappings with arrays ``input_ids`` and ``labels``, ``[tokens]``."""
        ...


class SourceStream:
    """The samples of one source, without end.

    Args:
        source: its files.
        encode: gives the samples of a record.
        seed: decides the order of files and records.
        window: records that are shuffled together.
        bad_lines: ``error`` or ``skip``.
        part: number of parts and index of this one: every so many-th file, or every so many-th record if there are
            fewer files or a limit.

    Raises:
        ConfigError: when samples are read: a bad line, a record that cannot be encoded, or a whole pass that gives no
            sample.
    """

    def __init__(
        self,
        source: Source,
        encode: Callable[[Record], Encoding],
        seed: int,
        window: int,
        bad_lines: Policy,
        part: tuple[int, int] = (1, 0),
    ) -> None:
        by_file = source.spec.limit is None and len(source.files) >= part[0]
        self._files = source.files[part[1] :: part[0]] if by_file else source.files
        self._part = (1, 0) if by_file else part
        self._source, self._encode, self._seed, self._size = source, encode, seed, window
        self._bad_lines: Policy = bad_lines
        self.load({**_START, "drawn": 0})

    def load(self, state: dict[str, int]) -> None:
        """Go on at ``state``."""
        self._drawn = state["drawn"]
        self._position = {name: state[name] for name in _START}
        self._next = self._position
        self._samples: list[dict[str, torch.Tensor]] | None = None
        self._reader: Iterator[tuple[Record | None, dict[str, int]]] | None = None

    def state(self) -> dict[str, int]:
        """Where the window begins, and how many of its samples were read."""
        return {**self._position, "drawn": self._drawn}

    def read(self) -> dict[str, torch.Tensor]:
        """The next sample."""
        if self._samples is None:
            self._samples = self._window()
        turns = self._position["turn"]
        while self._drawn >= len(self._samples):
            self._position, self._drawn = self._next, 0
            if self._position["turn"] > turns + 1:
                parts, index = self._part
                of = f", of the records for shard {index} of {parts}," if parts > 1 else ""
                raise ConfigError(f"{self._source.key} ({self._source.name}): no record{of} gives a sample.")
            self._samples = self._window()
        self._drawn += 1
        return self._samples[self._drawn - 1]

    def _window(self) -> list[dict[str, torch.Tensor]]:
        """The samples of the records from the position on, shuffled; a window ends with a pass."""
        if self._reader is None:
            self._reader = self._records(self._position)
        samples: list[dict[str, torch.Tensor]] = []
        for _ in range(self._size):
            record, self._next = next(self._reader)
            if record is None:
                break
            samples += [
                {key: torch.from_numpy(np.asarray(value, dtype=np.int64)) for key, value in sample.items()}
                for sample in self._encode(record).samples
            ]
        order = np.random.default_rng([self._seed, *self._position.values()]).permutation(len(samples))
        return [samples[index] for index in order]

    def _records(self, at: dict[str, int]) -> Iterator[tuple[Record | None, dict[str, int]]]:
        """The records from ``at`` on, each with the position after it, and None at the end of each pass."""
        source = self._source
        limit, format = source.spec.limit, source.find_format()
        parts, own = self._part
        turn, first, skipped, taken = at.values()
        while True:
            order = list(range(len(self._files)))
            if limit is None:  # else the first records in the order of the files
                order = np.random.default_rng([self._seed, turn]).permutation(len(order)).tolist()
            for place in range(first, len(order)):
                if taken == limit:
                    break
                for number, record in enumerate(read_file(self._files[order[place]], format, source.spec.kind)):
                    if number < skipped:
                        continue
                    if isinstance(record, BadLine):
                        refused = BadLines(self._bad_lines)
                        refused.add(record)
                        refused.check()
                        continue
                    taken += 1
                    if (taken - 1) % parts == own:
                        yield record, {"turn": turn, "file": place, "record": number + 1, "taken": taken}
                    if taken == limit:
                        break
                skipped = 0
            turn, first, skipped, taken = turn + 1, 0, 0, 0
            yield None, {**_START, "turn": turn}


class MixtureStream(IterableDataset[dict[str, torch.Tensor]]):
    """Samples of several sources, without end. It has a state, so a run resumes where it was.

    Args:
        sources: what is read.
        encode: gives the samples of a record; can be pickled.
        weights: relative probabilities of a sample to come from each source.
        names: how the sources are called.
        seed: decides every order.
        window: records of a source that are shuffled together.
        bad_lines: ``error`` ends with the first one, ``skip`` leaves them out.
        numbered: whether samples carry the number of their source (:mod:`ds_trainer.data.source_ids`).
    """

    def __init__(
        self,
        sources: Sequence[Source],
        encode: Callable[[Record], Encoding],
        weights: Sequence[float],
        *,
        names: Sequence[str],
        seed: int = 0,
        window: int = WINDOW,
        bad_lines: Policy = "error",
        numbered: bool = False,
    ) -> None:
        self.names = list(names)
        self.source_names = tuple(names) if numbered else None
        self.shares = [weight / sum(weights) for weight in weights]
        """The probability of a sample to come from each source."""
        self.seed = seed
        self._sources, self._encode = list(sources), encode
        self._window, self._bad_lines = window, bad_lines
        self._part = (1, 0)
        self._streams: list[SourceStream] = []
        self._draw = 0
        self._restored: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        at, self._restored = self._restored, None
        self._streams = [
            SourceStream(
                *(source, self._encode, self.seed + 1_000_003 * (number + 1), self._window, self._bad_lines, self._part)
            )
            for number, source in enumerate(self._sources)
        ]
        self._draw = 0
        if at is not None:
            self._draw = at["draw"]
            for stream, state in zip(self._streams, at["sources"], strict=True):
                stream.load(state)
        return self._samples()

    def _samples(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            block = self._draw // _DRAWS
            own = self._part[1:] if self._part[0] > 1 else ()  # each shard draws for itself
            draws = np.random.default_rng([self.seed, block, *own]).random(_DRAWS)
            chosen = np.searchsorted(np.cumsum(self.shares)[:-1], draws, side="right").tolist()
            for number in chosen[self._draw % _DRAWS :]:
                sample = self._streams[number].read()
                self._draw += 1
                yield sample if self.source_names is None else with_source(sample, number)

    @property
    def num_shards(self) -> int:
        """The number of files of the source that has the most."""
        return max(len(source.files) for source in self._sources)

    def shard(self, num_shards: int, index: int) -> MixtureStream:
        """Every ``num_shards``-th file of each source, or record if it has fewer files, from number ``index`` on."""
        part = copy.copy(self)
        part._part, part._streams, part._restored = (num_shards, index), [], None
        return part

    def state_dict(self) -> dict[str, Any]:
        """The position: the number of the next sample, and the position in each source."""
        if self._restored is not None:
            return self._restored
        if not self._streams:
            return {"draw": 0, "sources": [{**_START, "drawn": 0} for _ in self._sources]}
        return {"draw": self._draw, "sources": [stream.state() for stream in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at the position of ``state``.

        Raises:
            ConfigError: it is that of a stream of another number of sources.
        """
        if len(state["sources"]) != len(self._sources):
            raise ConfigError(
                f"The checkpoint has the position in {len(state['sources'])} sources, but data.train has "
                f"{len(self._sources)}. Resume with the sources of the run."
            )
        self._restored = state

    def describe(self) -> list[str]:
        """One line for each source: the share of the samples that come from it."""
        pairs = zip(self.names, self.shares, strict=True)
        return [f"{name}: {share:.1%} of the samples" for name, share in pairs]

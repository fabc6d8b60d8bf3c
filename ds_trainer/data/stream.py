"""Data that is read from beginning to end: no length, no positions, only an order.

Every replica reads the whole stream and keeps its share, exactly as of data with positions: a global batch is a run of
consecutive samples, rounds are dealt to the replicas in order, a ragged last round as evenly as possible. So every
layout sees the same global batches. The price: every replica (and every loading process) reads everything. Loading
processes share the collating, round by round, and read ahead; they do not read faster.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ds_trainer.data.loader import FillerBatch
from ds_trainer.data.lockstep import Lockstep
from ds_trainer.data.replica import replica_batches, replica_groups
from ds_trainer.data.skipping import as_if_at, skip
from ds_trainer.parallel.batch_plan import BatchPlan


def is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` can only be iterated: an IterableDataset of torch or ``datasets``, a generator, a reader."""
    if isinstance(dataset, IterableDataset):
        return True
    has_positions = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__iter__") and not has_positions


def length_of(dataset: Any) -> int | None:
    """``len(dataset)``, None where it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


class ShareOfStream(IterableDataset[Any]):
    """The micro-batches of one replica: ``(batch, is_filler, fingerprint of the round, state of the stream after it)``.

    The state is None where a step does not end, and of streams that have none.

    Args:
        stream: read anew for every epoch. Its ``set_epoch(epoch)`` is called where it has one; a ``torch.Generator``
            in its attribute ``generator`` is seeded with ``seed + epoch``.
        plan: the batch arithmetic.
        dp_rank: the replica.
        collate: makes a batch of a list of samples.
        seed: seed of the order.
    """

    def __init__(
        self, stream: Any, plan: BatchPlan, dp_rank: int, collate: Callable[[list[Any]], Any], seed: int = 0
    ) -> None:
        self.stream = stream
        self.plan = plan
        self.dp_rank = dp_rank
        self.collate = collate
        self.seed = seed
        # Shared with loading processes that live on from epoch to epoch.
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._place: tuple[int, int] | None = None
        self._loads = False  # whether this is a loading process
        self._resumed: Resumed | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return int(self._start[0])

    def start(self, epoch: int, first_sample: int, resumed: Resumed | None = None) -> None:
        """Choose what the next iteration gives.

        Args:
            epoch: counted from 0.
            first_sample: those before it have been had.
            resumed: how to get there; before the first iteration only, when there are no loading processes yet.
        """
        self._start[0], self._start[1] = epoch, first_sample
        self._resumed = resumed

    def __iter__(self) -> Iterator[tuple[Any, bool, int, Any]]:
        epoch, first = self._start.tolist()
        worker, workers = self._place_among_workers()
        source = self._begin(epoch, first, show=worker == 0)
        knows_place = has_state(self.stream)
        for index in itertools.count():
            rows = list(itertools.islice(source, self.plan.round_size))
            if self.plan.samples_used(len(rows)) == 0:
                return
            whole = len(rows) == self.plan.round_size
            if index % workers == worker:
                own = self.plan.share(0, self.dp_rank, len(rows))
                # Steps end there, and only there a checkpoint can be written. What has ended may say that it begins.
                asked = knows_place and whole and (index + 1) % self.plan.accumulation == 0
                state = copy.deepcopy(self.stream.state_dict()) if asked else None
                yield self.collate(rows[own.start : own.stop] or rows[:1]), not own, fingerprint(rows[0]), state
            if not whole:
                return

    def _begin(self, epoch: int, first: int, show: bool) -> Iterator[Any]:
        """The stream's samples from ``first`` on."""
        seed_stream(self.stream, self.seed, epoch)
        resumed = self._resumed
        if resumed is None or resumed.epoch != epoch or first == 0:
            source = iter(self.stream)
            skip(source, first, "samples", show=False)
            return source
        if resumed.state is not None and has_state(self.stream):
            self.stream.load_state_dict(copy.deepcopy(resumed.state))
            return iter(self.stream)
        # A loading process began with the same random state then, and goes on with what reading leaves.
        with nullcontext() if self._loads else as_if_at(resumed.random):
            source = iter(self.stream)
            skip(source, first, "samples", show and resumed.show)
        return source

    def _place_among_workers(self) -> tuple[int, int]:
        if self._place is None:
            info = get_worker_info()
            self._loads = info is not None
            self._place = (0, 1) if info is None else (info.id, info.num_workers)
            # The stream must not see that it is read by a loading process, or it may keep to a part of the data.
            torch.utils.data._utils.worker._worker_info = None
        return self._place


class StreamLoader(DataLoader[Any]):
    """Micro-batches of one replica from a stream, in step with the other ranks.

    Args:
        share: what this replica gets.
        window: rounds after which the ranks make sure that they read the same (one small all-reduce).
        num_workers: loading processes.
        pin_memory: page-locked memory for copies to a GPU.
        worker_options: further keywords of ``DataLoader`` that are about loading processes.

    ``len()`` is the number of rounds where the stream has a length, and a TypeError where it has none.

    Attributes:
        state: of the stream after the round that was read last (the rounds of a step are read together), where it has
            one and a step ends there; on the ranks that read.
    """

    state: Any = None

    def __init__(
        self,
        share: ShareOfStream,
        window: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        **worker_options: Any,
    ) -> None:
        self._window = window
        self._share = share
        self._worker_seeds = torch.Generator()  # the global generator is the model's
        super().__init__(
            share,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=self._worker_seeds,
            **worker_options,
        )

    @property
    def stream(self) -> Any:
        """What is read."""
        return self._share.stream

    def __len__(self) -> int:
        return self._share.plan.rounds(len(self._share.stream))

    @property
    def knows_place(self) -> bool:
        """Whether the stream can go to a place by itself; else what was had before must be read again."""
        return has_state(self._share.stream)

    def rounds_from(self, first_sample: int) -> int:
        """Rounds of an epoch from its sample ``first_sample`` on; a TypeError where the stream has no length."""
        return self._share.plan.rounds(max(0, len(self._share.stream) - first_sample))

    def start(self, epoch: int, first_sample: int = 0, resumed: Resumed | None = None) -> None:
        """Choose what the next iteration gives: ``epoch``, from its sample ``first_sample`` on."""
        self.state = None
        self._share.start(epoch, first_sample, resumed)

    def __iter__(self) -> Lockstep:  # type: ignore[override]  # an iterator serves as DataLoader's
        groups = replica_groups(self._share.plan.layout)
        return Lockstep(replica_batches(self._read, groups, pin_memory=self.pin_memory), self._window)

    def _read(self) -> Iterator[tuple[Any, int]]:
        self._worker_seeds.manual_seed(self._share.seed + self._share.epoch)
        for batch, is_filler, mark, state in super().__iter__():
            self.state = state
            yield (FillerBatch(batch) if is_filler and isinstance(batch, Mapping) else batch), mark


class Resumed(NamedTuple):
    """How a stream gets to the place in ``epoch`` where a run goes on.

    Attributes:
        epoch: for that one only.
        state: of the stream there; None where it had none.
        random: state of the generators when that epoch began, for a stream that is read again up to there.
        show: whether this process shows how far it is.
    """

    epoch: int
    state: Any = None
    random: dict[str, Any] | None = None
    show: bool = False


def has_state(stream: Any) -> bool:
    """Whether ``stream`` can say where it stands (``state_dict``) and go there again (``load_state_dict``), exactly.

    An IterableDataset of ``datasets`` with a shuffle buffer cannot: its state leaves out the samples in the buffer.
    """
    if not all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    return not _shuffles_in_a_buffer(getattr(stream, "_ex_iterable", None))


def _shuffles_in_a_buffer(examples: Any) -> bool:
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())]
    return type(examples).__name__ == "BufferShuffledExamplesIterable" or any(
        _shuffles_in_a_buffer(part) for part in inner if part is not None
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def seed_stream(stream: Any, seed: int, epoch: int) -> None:
    """Tell ``stream`` which epoch it is about to be read for: the same on all ranks."""
    set_epoch = getattr(stream, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    generator = getattr(stream, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed + epoch)


def fingerprint(sample: Any) -> int:
    """A 32-bit checksum of a sample's numbers and strings; of what else is in it, only the types count."""
    return _checksum(sample, 0)


def _checksum(value: Any, mark: int) -> int:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            mark = _checksum(value[key], zlib.crc32(str(key).encode(), mark))
        return mark
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for item in value:
            mark = _checksum(item, mark)
        return mark
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().flatten()
        return zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), mark)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), mark)
    if isinstance(value, (str, int, float, bytes, list, tuple)) or value is None:
        return zlib.crc32(repr(value).encode(), mark)
    return zlib.crc32(type(value).__name__.encode(), mark)

"""Streams: data that is read from beginning to end, without length and positions.

Every replica reads the whole stream and selects its samples as for map-style datasets: a global batch is a run of
consecutive samples, which the replicas divide in order, those of an incomplete last micro-step as evenly as possible.
So every layout sees the same global batches. The price: every replica (and every worker) reads everything. Workers
share the collating, one micro-step each, and read ahead; they do not read faster.

With ``stream_shards`` a replica reads its part of the stream only (:mod:`ds_trainer.data.stream_shards`).
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ds_trainer.data.batch_structure import as_dummy, counted
from ds_trainer.data.loader import as_set, pin_what_is_used, show_as
from ds_trainer.data.lockstep import EMPTY, RAGGED, SPARE, WHOLE, Aligned, Lockstep, fingerprint
from ds_trainer.data.replica import replica_batches, replica_groups
from ds_trainer.data.skipping import skip, with_random_state
from ds_trainer.data.stream_shards import ShardReader, StreamOrder, agreed
from ds_trainer.parallel.batch_plan import BatchPlan

if TYPE_CHECKING:
    from ds_trainer.data.sharded_batch import BatchSharder


def is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` can only be iterated: an IterableDataset of torch or ``datasets``, a generator, a reader."""
    if isinstance(dataset, IterableDataset):
        return True
    has_positions = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__iter__") and not has_positions


def length_of(dataset: Any) -> int | None:
    """``len(dataset)``; None if it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


_IN_ITS_ORDER = StreamOrder()


class StreamShard(IterableDataset[Any]):
    """The micro-batches of one replica: ``(batch, is_dummy, checksum of the micro-step, state of the stream after
    it)``.

    The state is None except at the end of a step, and for streams without a state. Of a stream that is read in shards:
    ``(batch, is_whole, index of the micro-step, states of shards)``, with None for the batch of one without samples.

    Args:
        stream: read again for every epoch. If it has ``set_epoch(epoch)``, that is called; a ``torch.Generator`` in its
            attribute ``generator`` is seeded with ``seed + epoch``.
        plan: the batch arithmetic.
        dp_rank: index of the replica.
        collate: returns a batch for a list of samples.
        seed: seed of the order.
        order: the order of every new epoch.
    """

    def __init__(
        self,
        stream: Any,
        plan: BatchPlan,
        dp_rank: int,
        collate: Callable[[list[Any]], Any],
        seed: int = 0,
        order: StreamOrder = _IN_ITS_ORDER,
    ) -> None:
        self.stream = stream
        self.plan = plan
        self.dp_rank = dp_rank
        self.collate = collate
        self.order = order
        # Shared with workers that persist from epoch to epoch: epoch, first sample, seed, order.
        self._start = torch.tensor([0, 0, seed, *order], dtype=torch.int64).share_memory_()
        self._worker: tuple[int, int] | None = None
        self._is_worker = False  # whether this is a worker process
        self._resumed: StreamResume | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return int(self._start[0])

    @property
    def seed(self) -> int:
        """Seed of the order of the next iteration."""
        return int(self._start[2])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads."""
        self._start[0] = epoch

    def start(self, epoch: int, first_sample: int, seed: int, resumed: StreamResume | None = None) -> None:
        """Set what the next iteration reads.

        Args:
            epoch: counted from 0.
            first_sample: index of the first sample to read.
            seed: seed of the order.
            resumed: how to get there; only before the first iteration, when there are no workers yet.
        """
        self._start[:3] = torch.tensor([epoch, first_sample, seed])
        self._resumed = resumed

    def set_order(self, order: StreamOrder) -> None:
        """Set the order of the next iteration."""
        self._start[3:] = torch.tensor(order)

    def __iter__(self) -> Iterator[tuple[Any, int, int, Any]]:
        epoch, first, _, shards, run, own = self._start.tolist()
        worker, workers = self._worker_index()
        if shards:
            yield from self._read_shards(StreamOrder(shards, run, bool(own)), epoch, first)
            return
        source = self._begin(epoch, first, show=worker == 0)
        stateful = has_state(self.stream)
        for index in itertools.count():
            rows = list(itertools.islice(source, self.plan.samples_per_micro_step))
            if self.plan.samples_used(len(rows)) == 0:
                return
            whole = len(rows) == self.plan.samples_per_micro_step
            if index % workers == worker:
                own = self.plan.rank_samples(0, self.dp_rank, len(rows))
                # Checkpoints are only written at the end of a step. An exhausted stream may return its initial state,
                # so the state after an incomplete micro-step is not used.
                ends_step = whole and (index + 1) % self.plan.accumulation == 0
                state = copy.deepcopy(self.stream.state_dict()) if stateful and ends_step else None
                mark, chosen = fingerprint(rows[0]), rows[own.start : own.stop] or rows[:1]
                rows.clear()
                made = [(counted(self.collate(chosen), len(chosen)), not own, mark, state)]
                chosen.clear()
                yield made.pop()  # nothing here holds the samples while their batch is in use
            if not whole:
                return

    def _read_shards(self, order: StreamOrder, epoch: int, first: int) -> Iterator[tuple[Any, int, int, Any]]:
        resumed = self._resumed if first and self._resumed is not None and self._resumed.epoch == epoch else None
        if resumed is not None and self._is_worker:
            resumed = resumed._replace(random=None)
        reader = ShardReader(
            self.stream,
            order,
            self.plan,
            self.dp_rank,
            prepare=partial(seed_stream, seed=self.seed, epoch=epoch),
            stateful=has_state(self.stream),
        )
        for index, rows, states in reader.micro_steps(first, *self._worker_index(), resumed):
            batch = counted(self.collate(rows), len(rows)) if rows else None
            made = [(batch, len(rows), index, states)]
            del batch
            rows.clear()
            yield made.pop()  # nothing here holds the samples while their batch is in use

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
        # A worker began with the same random state at that time, and continues with the state after reading.
        with nullcontext() if self._is_worker else with_random_state(resumed.random):
            source = iter(self.stream)
            skip(source, first, "samples", show and resumed.show)
        return source

    def _worker_index(self) -> tuple[int, int]:
        """Index of this worker, and number of workers."""
        if self._worker is None:
            info = get_worker_info()
            self._is_worker = info is not None
            self._worker = (0, 1) if info is None else (info.id, info.num_workers)
            # The stream must not know that a worker reads it, or it may read only a part of the data.
            torch.utils.data._utils.worker._worker_info = None
        return self._worker


class StreamLoader(DataLoader[Any]):
    """The micro-batches of one replica from a stream, in lockstep with the other ranks.

    Args:
        shard: the samples of this replica.
        window: micro-steps between two comparisons of what the ranks read (one small all-reduce).
        num_workers: data loader workers.
        pin_memory: use page-locked memory for copies to a GPU.
        worker_options: further keywords of ``DataLoader`` for workers.

    ``len()`` is the number of micro-steps, or a TypeError if the stream has no length.

    Attributes:
        dataset: the stream.
        batch_size: samples of a micro-batch on one replica.
        seed: seed of the order.
        collate_fn: returns a batch for a list of samples.
        drop_last: whether samples of an incomplete last micro-step are dropped.
        state: state of the stream after the last micro-step read (those of a step are read together), if the stream has
            a state and a step ends there; on the reading ranks only. Read in shards: the states of those that this
            process has read, by number.
        order: the order of the present epoch.
        rows_read: samples that this process has read of each shard, by number, in an epoch read from its beginning.
        sharder, pins_shards: what :class:`ds_trainer.data.loader.PlannedLoader` takes.
    """

    state: Any = None
    order: StreamOrder | None = None
    sharder: BatchSharder | None = None
    pins_shards = False

    def __init__(
        self,
        shard: StreamShard,
        window: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        **worker_options: Any,
    ) -> None:
        self.window = window
        self._shard = shard
        self._resumed_states: dict[int, Any] = {}
        self.rows_read: Counter[int] = Counter()
        self.seed = shard.seed
        self._worker_seeds = torch.Generator()  # the global generator is for the model
        options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "generator": self._worker_seeds,
            **worker_options,
        }
        plan = shard.plan
        super().__init__(shard, batch_size=plan.micro_batch, collate_fn=shard.collate, **options)
        show_as(self, plan, dataset=shard.stream)
        self._reader: DataLoader[Any] = DataLoader(shard, batch_size=None, collate_fn=_identity, **options)

    @property
    def total_batch_size(self) -> int:
        """Samples of a whole micro-step over all replicas: the micro-batch x data-parallel ranks."""
        return self._shard.plan.samples_per_micro_step

    def cut_with(self, sharder: BatchSharder | None) -> None:
        """Cut the batches of the next iterations for the ranks of a replica; None: give each rank whole ones again."""
        self.sharder = sharder
        pin_what_is_used(self, self._reader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads; the loop of the Trainer does it itself."""
        self._shard.set_epoch(epoch)

    @property
    def stream(self) -> Any:
        """The stream that is read."""
        return self._shard.stream

    def __len__(self) -> int:
        if self._shard.order.shards:
            raise TypeError("the lengths of the shards of a stream are not known")
        return self._shard.plan.micro_steps(len(self._shard.stream))

    def shards_of(self, order: StreamOrder, first_sample: int) -> range:
        """The shards that this replica reads in ``order`` from its sample ``first_sample`` on."""
        return order.shards_of(self._shard.dp_rank, self._shard.plan, first_sample)

    @property
    def is_stateful(self) -> bool:
        """Whether the stream can restore a position; otherwise earlier data must be read again."""
        return has_state(self._shard.stream)

    def micro_steps_from(self, first_sample: int) -> int:
        """Micro-steps of an epoch from its sample ``first_sample`` on; a TypeError if the stream has no length."""
        return self._shard.plan.micro_steps(max(0, len(self._shard.stream) - first_sample))

    def start(
        self,
        epoch: int,
        first_sample: int = 0,
        resumed: StreamResume | None = None,
        seed: int | None = None,
        order: StreamOrder | None = None,
    ) -> None:
        """Set what the next iteration reads: ``epoch``, from its sample ``first_sample`` on.

        Args:
            epoch: counted from 0.
            first_sample: index in the order of that epoch.
            resumed: how a resumed run gets there.
            seed: seed of the order; default: :attr:`seed`.
            order: the order in which the epoch was begun; default: that of a new epoch.
        """
        self.order = order
        self.state = None
        self._resumed_states = (resumed.state if resumed is not None and first_sample else None) or {}
        self._shard.start(epoch, first_sample, self.seed if seed is None else seed, resumed)

    def __iter__(self) -> Lockstep:  # type: ignore[override]  # an iterator serves as DataLoader's
        shard = self._shard
        new = agreed(shard.order, shard.stream, self.order)
        if self.order is None:
            self.order = new
        self.order.check(shard.stream, shard.plan, new.own)
        shard.set_order(self.order)
        shard.collate = self.collate_fn  # a script may have set another one
        self._worker_seeds.manual_seed(shard.seed + shard.epoch)
        if self.num_workers:  # `datasets` shares its epoch, to which workers would add the difference several times
            seed_stream(shard.stream, shard.seed, shard.epoch)
        groups = replica_groups(shard.plan.layout)
        pin = self.pin_memory or self.pins_shards
        read = self._read_shards if self.order.shards else self._read
        batches = replica_batches(read, groups, pin_memory=pin, sharder=self.sharder)
        return Aligned(batches, self.window, self.drop_last) if self.order.shards else Lockstep(batches, self.window)

    def _read(self) -> Iterator[tuple[Any, int]]:
        for batch, is_dummy, mark, state in as_set(self._reader, self):
            self.state = state
            item = [(as_dummy(batch) if is_dummy else batch, mark)]
            del batch
            yield item.pop()  # nothing here holds the whole batch while its shards are in use

    def _read_shards(self) -> Iterator[tuple[Any, int]]:
        states: dict[int, Any] = dict(self._resumed_states)
        self.state = states if self.is_stateful else None
        done, self.rows_read = 0, Counter()
        for batch, rows, index, state in as_set(self._reader, self):
            if batch is None:
                continue
            for _ in range(done, index):  # their shards have ended
                yield as_dummy(batch), EMPTY
            states.update(state)
            done = max(done, index + 1)
            if self.order is not None and index >= 0:
                self.rows_read[(self._shard.dp_rank + index * self._shard.plan.layout.dp) % self.order.shards] += rows
            item = [(batch, SPARE if index < 0 else WHOLE if rows == self._shard.plan.micro_batch else RAGGED)]
            del batch
            yield item.pop()


class StreamResume(NamedTuple):
    """How a stream reaches the position in ``epoch`` from which a run resumes.

    Attributes:
        epoch: the epoch.
        state: state of the stream at that position; None if it has none. Read in shards: those of shards, by number.
        random: state of the generators at the beginning of the epoch, for a stream that is read again up to there.
        show: whether this process shows a progress bar.
    """

    epoch: int
    state: Any = None
    random: dict[str, Any] | None = None
    show: bool = False


def has_state(stream: Any) -> bool:
    """Whether ``stream`` can save and restore its position exactly (``state_dict``, ``load_state_dict``).

    An IterableDataset of ``datasets`` with a shuffle buffer cannot: its state does not include the buffered samples.
    """
    if not all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    wrapped = getattr(stream, "base_dataloader", None)  # a loader of accelerate always has the methods
    if wrapped is not None and not has_state(wrapped):
        return False
    return not _shuffles_in_a_buffer(getattr(stream, "_ex_iterable", None))


def _shuffles_in_a_buffer(examples: Any) -> bool:
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())]
    return type(examples).__name__ == "BufferShuffledExamplesIterable" or any(
        _shuffles_in_a_buffer(part) for part in inner if part is not None
    )


def _identity(batch: Any) -> Any:
    return batch


def seed_stream(stream: Any, seed: int, epoch: int) -> None:
    """Seed ``stream`` for an epoch, equally on all ranks."""
    set_epoch = getattr(stream, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    generator = getattr(stream, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed + epoch)

"""Streams that replicas read in part: shards that are read side by side, and the order of samples that follows.

The order takes a *run* of samples from each shard in turn. A shard that has ended leaves its places empty. A global
batch is, as for any data, a run of consecutive places of the order, and the layout decides only which replica reads
which of them. So the samples of an epoch are the same in any layout, and their order follows from the numbers in
:class:`StreamOrder`, which checkpoints hold: a run can resume in any layout.

Each shard has one reader if a run is a micro-batch and there are as many shards as loading processes.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ds_trainer.data.skipping import skip, with_random_state
from ds_trainer.parallel.batch_plan import BatchPlan
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.logging import get_logger
from ds_trainer.utils.units import counted

if TYPE_CHECKING:
    from ds_trainer.data.stream import StreamResume

logger = get_logger(__name__)

READERS = 8
"""Replicas that may read the same samples without a warning."""
_UNEVEN = 1.1
"""By how much the longest shard may exceed the mean, if shards are chosen here."""


class StreamOrder(NamedTuple):
    """The order of an epoch of a stream.

    Attributes:
        shards: shards that are read side by side; 0: every replica reads the whole stream, in its order.
        run: samples that are taken from a shard in turn.
        own: whether the dataset itself gives each replica its samples; shard ``n`` is then what replica ``n`` reads.
    """

    shards: int = 0
    run: int = 0
    own: bool = False

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Where ``count`` samples from place ``first`` of the order on are: shard, index in it, number of samples."""
        end = first + count
        while first < end:
            turn, offset = divmod(first, self.run)
            size = min(self.run - offset, end - first)
            yield turn % self.shards, turn // self.shards * self.run + offset, size
            first += size

    def readers(self, replicas: int) -> int:
        """Replicas that read the same samples."""
        return 1 if self.own else replicas // math.gcd(replicas, max(1, self.shards))

    def shards_of(self, replica: int, plan: BatchPlan, first: int = 0) -> range:
        """The shards of which a replica may read from place ``first`` on."""
        apart = math.gcd(plan.layout.dp, self.shards) if self._fits(plan, first) else 1
        return range(replica % apart, self.shards, apart)

    def offset_of(self, replica: int, plan: BatchPlan, first: int) -> int:
        """Where in a micro-step the samples of a replica begin, if micro-steps are counted from place ``first``.

        Chosen so that a replica has the same shards wherever the counting begins.
        """
        turns = first // self.run if self._fits(plan, first) else 0
        return (replica - turns) % plan.layout.dp * plan.micro_batch

    def _fits(self, plan: BatchPlan, first: int) -> bool:
        return self.run == plan.micro_batch and first % self.run == 0

    def check(self, stream: Any, plan: BatchPlan, own: bool) -> None:
        """Reject an order, that of a checkpoint in the middle of an epoch, in which ``stream`` cannot be read.

        Raises:
            ConfigError: names the numbers of both and the remedy.
        """
        if self.own != own or (own and (self.shards, self.run) != (plan.layout.dp, plan.micro_batch)):
            now = StreamOrder(plan.layout.dp, plan.micro_batch, True) if own else StreamOrder()
            difference = f"{self._text()}. Now {now._text()}"
        elif self.shards > shards_in(stream) and not own:
            difference = f"{self._text()}. Now train_dataset, a {type(stream).__name__}, has {shards_in(stream)} shards"
        else:
            return
        raise ConfigError(
            f"The checkpoint is in the middle of an epoch in which {difference}. Resume with the data, the replicas "
            "and the per_device_train_batch_size of then, or begin the epoch again with ignore_data_skip=True."
        )

    def _text(self) -> str:
        if self.own:
            return f"the dataset gave each of {self.shards} replicas its own samples, {self.run} in a micro-batch"
        if self.shards:
            return f"the samples came from {self.shards} shards of the stream"
        return "the dataset gave all replicas the same samples"


def shards_in(stream: Any) -> int:
    """How many shards ``stream`` can be divided into: its ``num_shards`` if it has ``shard(num_shards, index)``."""
    number = getattr(stream, "num_shards", 1) if callable(getattr(stream, "shard", None)) else 1
    return number if isinstance(number, int) else 1


def is_split_for(stream: Any, replica: int, replicas: int) -> bool:
    """Whether ``stream`` is a dataset of ``datasets`` that ``split_dataset_by_node`` has divided among the replicas."""
    split = getattr(getattr(stream, "stream", stream), "_distributed", None)  # inside of a packed one
    return replicas > 1 and split is not None and (split.rank, split.world_size) == (replica, replicas)


def stream_order(
    stream: Any, plan: BatchPlan, replica: int, setting: int | str | None = None, workers: int = 0
) -> StreamOrder:
    """The order of a new epoch.

    Args:
        stream: the data.
        plan: sizes of the batches.
        replica: index of this replica.
        setting: the argument ``stream_shards``.
        workers: data loader workers of each replica.

    Raises:
        ConfigError: the stream has fewer shards than requested.
    """
    replicas, available = plan.layout.dp, shards_in(stream)
    if setting == "own" or is_split_for(stream, replica, replicas):
        return StreamOrder(replicas, plan.micro_batch, own=True) if replicas > 1 else StreamOrder()
    if isinstance(setting, int) and setting > available:
        raise ConfigError(
            f"stream_shards={setting}, but train_dataset, a {type(stream).__name__}, has {available}: it needs "
            "num_shards and shard(num_shards, index), as the IterableDataset of datasets has, and a file for each "
            f"shard. Set stream_shards to at most {available}, 'auto', or leave it out."
        )
    if setting == "auto":
        # The largest number of shards of about equal length that divide the replicas, or the workers of all replicas.
        numbers = [number for number in range(1, replicas) if replicas % number == 0]
        numbers += [replicas * number for number in range(1, max(1, workers) + 1) if max(1, workers) % number == 0]
        setting = max(n for n in numbers if n == 1 or math.ceil(available / n) * n <= _UNEVEN * available)
    return StreamOrder(setting, plan.micro_batch) if isinstance(setting, int) and setting > 1 else StreamOrder()


def warn_of_readers(stream: Any, order: StreamOrder, replicas: int, setting: int | str | None) -> None:
    """Say on one rank how often each sample is read, if that is often."""
    readers, available = order.readers(replicas), shards_in(stream)
    if readers < (READERS if setting is None else 2) or distributed.rank() != 0:
        return
    if available < 2:
        remedy = (
            "It has no shards that a replica could read alone: num_shards and shard(num_shards, index), as the "
            "IterableDataset of datasets has for several files. If the dataset gives each replica its own samples, set "
            "stream_shards='own'; a map-style dataset reads only what a rank trains on."
        )
    elif setting is None:
        remedy = f"It has {counted(available, 'shard')}: with stream_shards='auto' each replica reads its own."
    else:
        remedy = (
            f"It has {counted(available, 'shard')} for {replicas} replicas: a multiple of {replicas} could be divided."
        )
    logger.warning(
        "Each sample of the %s is read by %d replicas and used by one. %s", type(stream).__name__, readers, remedy
    )


class ShardReader:
    """Reads micro-batches of one replica from its shards, in one process.

    Args:
        stream: the stream, or with ``order.own`` the samples of this replica.
        order: the order of the epoch.
        plan: sizes of the batches.
        replica: index of the replica.
        prepare: called with each shard before it is read.
        stateful: whether shards can save and restore their position.
    """

    def __init__(
        self,
        stream: Any,
        order: StreamOrder,
        plan: BatchPlan,
        replica: int,
        *,
        prepare: Callable[[Any], None],
        stateful: bool,
    ) -> None:
        self._stream, self._order, self._plan, self._replica = stream, order, plan, replica
        self._prepare, self._stateful = prepare, stateful
        self._open: dict[int, _OpenShard] = {}
        self._states: dict[int, dict[str, Any]] = {}

    def micro_steps(
        self, first: int, worker: int, workers: int, resumed: StreamResume | None
    ) -> Iterator[tuple[int, list[Any], dict[int, dict[str, Any]]]]:
        """Every ``workers``-th micro-step: its index, the samples, and where their shards are then.

        Those without samples are given too, up to the end of the last shard: what reads from several workers in turn
        would otherwise get later micro-steps first. Only the last visit of a shard in a step says where it is. If there
        are no samples at all, worker 0 gives one of any shard with index -1, from which a dummy batch can be made.

        Args:
            first: place in the order of the first sample.
            worker: index of this process among those of the replica.
            workers: number of these processes.
            resumed: how to get to ``first``: the states of shards by their number, or the random state with which they
                are read again (None in a loading process, which goes on with its own).
        """
        size, accumulation = self._plan.samples_per_micro_step, self._plan.accumulation
        offset = self._order.offset_of(self._replica, self._plan, first)
        period = self._order.run * self._order.shards
        period //= math.gcd(period, workers * size)  # micro-steps of this worker until it is at the same shards again
        if resumed is not None:
            self._states = resumed.state or {}
            if not self._stateful:
                with nullcontext() if resumed.random is None else with_random_state(resumed.random):
                    again = (self._read(offset + index * size) for index in range(worker, first // size, workers))
                    skip(again, first // size, "micro-batches", resumed.show and worker == 0)
        empty, any_rows = 0, False
        for index in itertools.count(worker, workers):
            rows, shards = self._read(first + offset + index * size)
            empty = 0 if rows else empty + 1
            if empty == period:
                break
            any_rows = any_rows or bool(rows)
            ends = rows and self._stateful and (index + period * workers) // accumulation > index // accumulation
            yield index, rows, {number: self._open[number].state() for number in shards} if ends else {}
        if not any_rows and worker == 0:
            numbers = [self._replica] if self._order.own else range(self._order.shards)
            row = next((row for number in numbers for row in self._shard(number)), None)
            if row is not None:
                yield -1, [row], {}

    def _read(self, place: int) -> tuple[list[Any], list[int]]:
        """The samples of a micro-batch that begins at ``place``, and the numbers of their shards."""
        rows: list[Any] = []
        shards: list[int] = []
        for number, index, count in self._order.pieces(place, self._plan.micro_batch):
            if number not in self._open:
                saved = self._states.get(number)
                usable = saved if saved is not None and saved["index"] <= index else None
                self._open[number] = _OpenShard(self._shard(number), usable)
            rows += self._open[number].read(index, count)
            shards.append(number)
        return rows, shards

    def _shard(self, number: int) -> Any:
        order = self._order
        shard = self._stream if order.own else self._stream.shard(num_shards=order.shards, index=number)
        self._prepare(shard)
        return shard


class _OpenShard:
    """A shard that is read forward."""

    def __init__(self, stream: Any, saved: dict[str, Any] | None) -> None:
        self._stream = stream
        self._index = 0 if saved is None else int(saved["index"])
        self._ended = saved is not None and bool(saved["ended"])
        if saved is not None and not self._ended:
            stream.load_state_dict(copy.deepcopy(saved["state"]))
        self._samples: Iterator[Any] = iter(()) if self._ended else iter(stream)

    def read(self, index: int, count: int) -> list[Any]:
        """Up to ``count`` samples from ``index`` on; fewer at the end."""
        if self._ended:
            return []
        for _ in itertools.islice(self._samples, index - self._index):
            self._index += 1
        rows = list(itertools.islice(self._samples, count)) if self._index == index else []
        self._index += len(rows)
        self._ended = len(rows) < count
        return rows

    def state(self) -> dict[str, Any]:
        """Where the shard is. One that has ended may say that it is at its beginning, so that is not asked."""
        state = None if self._ended else copy.deepcopy(self._stream.state_dict())
        return {"index": self._index, "ended": self._ended, "state": state}


def agreed(order: StreamOrder, stream: Any, begun: StreamOrder | None) -> StreamOrder:
    """``order``; the whole stream if the dataset was divided for some replicas only. Collective.

    Args:
        order: the order of a new epoch on this rank.
        stream: the data of this rank.
        begun: the order of an epoch that is continued.

    Raises:
        ConfigError: on all ranks, if shards are to be read, and their data has different numbers of shards or is made
            of different files.
    """
    available, sharded = shards_in(stream), order if begun is None else begun
    lists = list(source_lists(stream)) if sharded.shards and not sharded.own else []
    names, paths = (reduce(_add, map(of, itertools.chain(*lists)), 0) for of in (_name, str))
    facts = [int(order.own), available, sharded.shards, names, paths]
    own, most, shards, *ours, not_own, least, _, name, path = distributed.agree(
        torch.tensor([*facts, *(-number for number in [facts[0] - 1, *facts[1:]])])
    )
    if own and not_own:
        return StreamOrder()
    if not shards or own:
        return order
    problem = ""
    if most != -least:
        numbers = distributed.gather_objects(available)
        problem = (
            f"has different numbers of shards ({listed(sorted(set(numbers)))}; rank 0 has "
            f"{numbers[0]}, rank {numbers.index(-least if numbers[0] == most else most)} another number)"
        )
    elif ours[0] != -name:
        numbers = distributed.gather_objects(names)
        other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        problem = f"is made of different files (rank {other} has others than rank 0), of which most would not be read"
    elif ours[1] != -path and distributed.rank() == 0:
        logger.warning(
            "The ranks' streams are made of files with the same names in different folders. With stream_shards each "
            "replica reads its part of them: if the folders differ in content, data is lost; set stream_shards='own'."
        )
    if problem:
        raise ConfigError(
            f"The ranks' data {problem}. Each replica reads its part of the shards of the whole stream, so give every "
            "rank the same files in the same order, or set stream_shards='own' if each replica has its own."
        )
    return order


def source_lists(stream: Any) -> Iterator[list[Any]]:
    """The lists of files that ``stream`` is made of, or of numbers of its parts, as far as they can be seen.

    They are attributes of a user's stream, and for one of ``datasets`` arguments of the function that reads it. Streams
    inside of a stream are looked at too.
    """
    examples = getattr(stream, "_ex_iterable", stream)
    kwargs = getattr(examples, "kwargs", None)
    kinds = (str, os.PathLike) if kwargs is None else (str, os.PathLike, int)  # a user's numbers may be the samples
    for value in (getattr(examples, "__dict__", {}) if kwargs is None else kwargs).values():
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, kinds) for item in value):
            yield list(value)
    inner = [getattr(examples, "stream", None), getattr(examples, "ex_iterable", None)]
    for part in [*inner, *(getattr(examples, "ex_iterables", None) or ())]:
        if part is not None:
            yield from source_lists(part)


def _add(checksum: int, text: str) -> int:
    return zlib.crc32(f"{text}\n".encode(), checksum)


def _name(item: Any) -> str:
    return str(item) if isinstance(item, int) else os.path.basename(os.fspath(item))

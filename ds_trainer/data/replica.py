"""The ranks of a replica work on the same samples: one rank reads, the others receive its batches.

Reading on every rank would require that the data is deterministic. A dataset that draws random numbers, a file that is
being written or a user's loader may not be: tensor-parallel ranks would then multiply slices of different batches, and
nothing would fail. DeepSpeed compares the batches of the first forward pass only.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ds_trainer.data.batch_transfer import receive, send
from ds_trainer.data.skipping import skip, with_random_state
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.failures import PeerFailure
from ds_trainer.utils.logging import get_logger

if TYPE_CHECKING:
    from ds_trainer.data.sharded_batch import BatchSharder, ShardedBatch
    from ds_trainer.parallel.groups import ParallelGroups
    from ds_trainer.parallel.layout import ParallelLayout

logger = get_logger(__name__)

_SEEDS = 2**31  # numpy allows no larger ones


class _Batch(NamedTuple):
    value: Any


class _Cut(NamedTuple):
    """A batch whose shards are sent to each rank; ``rest`` are the other elements of an item that is a tuple."""

    rest: tuple[Any, ...] | None


class _End(NamedTuple):
    """The end of the batches; ``failed`` is the error that ended them, if any."""

    failed: str | None = None


def replica_groups(layout: ParallelLayout) -> ParallelGroups | None:
    """The groups over which batches are sent; None if every replica is one rank, or before the ranks are connected.

    Collective at the first call.
    """
    if layout.replica_size == 1 or distributed.world_size() != layout.world_size:
        return None
    from ds_trainer.parallel.groups import parallel_groups

    return parallel_groups(layout)


def replica_batches(
    source: Callable[[], Iterable[Any]],
    groups: ParallelGroups | None,
    during: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    pin_memory: bool = False,
    read_along: bool = False,
    sharder: BatchSharder | None = None,
) -> Iterator[Any]:
    """Iterate over ``source()`` once in each replica; all its ranks get equal items. Collective over the replica.

    With ``sharder``, each rank gets its shard of an item instead (of the first element of an item that is a tuple).

    The global random states (torch on the CPU, numpy, Python) stay equal on the ranks of a replica whatever the data
    draws: during reading they are seeded with a number that every rank draws.

    Args:
        source: returns the iterable; called on the reading rank only, so that only this rank starts workers.
        groups: the process groups; None or replicas of one rank: iterate over ``source()`` directly.
        during: a context manager entered with each received item while it is in use.
        pin_memory: put received tensors in page-locked memory.
        read_along: the other ranks read too, and drop what they read: for loaders whose iteration is collective.
        sharder: cuts the items.

    Raises:
        PeerFailure: the reading rank failed; that rank raises its own error.
    """
    if groups is None or groups.layout.replica_size == 1:
        return iter(source())
    if groups.replica_host.rank() == 0:
        return _read(source, groups, sharder, pin_memory and torch.cuda.is_available())
    received = _listen(groups, during, pin_memory and torch.cuda.is_available())
    return _read_along(source, received) if read_along else received


def batches_of(
    loader: Any,
    layout: ParallelLayout,
    first_micro_step: int = 0,
    epoch_random_state: dict[str, Any] | None = None,
    show: bool = False,
) -> Iterator[Any]:
    """The batches of a user's loader; each replica gets those of its first rank.

    Args:
        loader: any iterable.
        layout: defines the replicas.
        first_micro_step: number of batches to read and drop first.
        epoch_random_state: state of the generators at the beginning of the epoch, for an epoch that is resumed.
        show: whether this process shows a progress bar while skipping.
    """

    def read() -> Iterator[Any]:
        if epoch_random_state is None and first_micro_step == 0:
            batches = iter(loader)
        else:
            with with_random_state(epoch_random_state):
                batches = iter(loader)
                skip(batches, first_micro_step, "batches", show)
        yield from batches

    return replica_batches(
        read,
        replica_groups(layout),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        read_along=bool(getattr(loader, "_is_accelerate_prepared", False)),  # its ranks exchange random states
    )


def _read(
    source: Callable[[], Iterable[Any]], groups: ParallelGroups, sharder: BatchSharder | None, pin_memory: bool
) -> Iterator[Any]:
    items: Iterator[Any] | None = None
    while True:
        try:
            with _random_states_of_data():
                if items is None:
                    items = iter(source())
                value = next(items)
            rest = value[1:] if isinstance(value, tuple) else None
            batch = value if rest is None else value[0]
            own = None if sharder is None else _send_shards(sharder, batch, rest, groups, pin_memory)
            if own is None:
                send(_Batch(value), groups.replica_host)
            else:
                value = _with(own, rest)
        except StopIteration:
            send(_End(), groups.replica_host)
            return
        except (Exception, SystemExit) as error:
            send(_End(f"{type(error).__name__}: {error}"), groups.replica_host)
            raise
        batch = own = None  # the whole batch, of which this rank keeps its shard
        yield value


def _with(batch: Any, rest: tuple[Any, ...] | None) -> Any:
    return batch if rest is None else (batch, *rest)


def _send_shards(
    sharder: BatchSharder, batch: Any, rest: tuple[Any, ...] | None, groups: ParallelGroups, pin_memory: bool
) -> ShardedBatch | None:
    """Send the other ranks their shards; returns this rank's. One shard of another rank exists at a time.

    None for a batch that cannot be cut, and nothing is sent. Every rank is then to get it whole: each cuts it by itself
    before it is used, and raises what is wrong with it. That says more than the failure of another rank.
    """
    if not isinstance(batch, Mapping):
        return None
    shards = sharder.shards(batch, groups)
    try:
        own = next(shards)
    except ConfigError as error:
        logger.debug("a batch goes whole to every rank, which is to say this of it: %s", error)
        return None
    send(_Cut(rest), groups.replica_host)
    for rank, shard in enumerate(shards, start=1):
        send(shard, groups.replica_host, to=rank)
    return dataclasses.replace(own, local=_pinned(own.local)) if pin_memory else own


def _pinned(batch: dict[str, Any]) -> dict[str, Any]:
    items = {key: value.pin_memory() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    return type(batch)(items)


def _listen(
    groups: ParallelGroups, during: Callable[[Any], AbstractContextManager[Any]], pin_memory: bool
) -> Iterator[Any]:
    while True:
        _seed_of_data()
        item = receive(groups.replica_host, pin_memory)
        if isinstance(item, _End):
            if item.failed is None:
                return
            reader = groups.layout.rank_at(dp=groups.coordinates.dp)
            raise PeerFailure(
                f"rank {reader}, which reads the data of replica {groups.coordinates.dp}, failed with {item.failed}. "
                "See the traceback in that rank's output."
            )
        if isinstance(item, _Cut):
            value = _with(receive(groups.replica_host, pin_memory, alone=True), item.rest)
        else:
            value = item.value
        with during(value):
            yield value


def _read_along(source: Callable[[], Iterable[Any]], received: Iterator[Any]) -> Iterator[Any]:
    own: Iterator[Any] | None = None
    while True:
        states = _states()
        own = iter(source()) if own is None else own
        next(own, None)
        _restore(states)
        try:
            yield next(received)
        except StopIteration:
            return


def _seed_of_data() -> int:
    return int(torch.randint(_SEEDS, (), dtype=torch.int64))


@contextmanager
def _random_states_of_data() -> Iterator[None]:
    """Separate random numbers for the data inside; outside, every rank has drawn exactly one number."""
    seed = _seed_of_data()
    states = _states()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the devices too
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        _restore(states)


def _states() -> tuple[Any, Any, Any]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])

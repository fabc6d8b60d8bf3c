"""The ranks of a replica work on the same samples: one of them reads, the others receive what it read.

Reading on each rank would be enough only for data that gives the same for the same position every time. A dataset that
draws random numbers, a file that is being written, a loader of somebody else need not: tensor-parallel ranks would then
multiply slices of different batches, and nothing would fail. DeepSpeed looks at the first forward pass only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ds_trainer.data.sending import receive, send
from ds_trainer.data.skipping import as_if_at, skip
from ds_trainer.utils import distributed
from ds_trainer.utils.failures import PeerFailure

if TYPE_CHECKING:
    from ds_trainer.parallel.groups import ParallelGroups
    from ds_trainer.parallel.layout import ParallelLayout

_SEEDS = 2**31  # numpy takes no larger ones


class _Batch(NamedTuple):
    value: Any


class _End(NamedTuple):
    """No more batches; ``failed`` says which error ended them."""

    failed: str | None = None


def replica_groups(layout: ParallelLayout) -> ParallelGroups | None:
    """The groups over which batches are handed on; None where every replica is one rank, or no ranks have met yet.

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
) -> Iterator[Any]:
    """Iterate over ``source()`` once in each replica; all its ranks get equal items. Collective over the replica.

    The global random states (torch on the CPU, numpy, Python) stay equal on the ranks of a replica whatever the data
    draws: while it is read they are seeded with a number that every rank draws.

    Args:
        source: makes what is iterated over; called on the reading rank only, so that only that one starts loading
            processes.
        groups: None, or groups of one rank for each replica: ``source()`` is iterated over as it is.
        during: a context entered with each item that was received, for as long as it is worked on.
        pin_memory: let received tensors lie in page-locked memory.
        read_along: the other ranks read too, and leave out what they read: for loaders whose iteration is a collective.

    Raises:
        PeerFailure: the reading rank failed; that one raises its own error.
    """
    if groups is None or groups.layout.replica_size == 1:
        return iter(source())
    if groups.replica_host.rank() == 0:
        return _read(source, groups)
    received = _listen(groups, during, pin_memory and torch.cuda.is_available())
    return _read_along(source, received) if read_along else received


def batches_of(
    loader: Any,
    layout: ParallelLayout,
    first_round: int = 0,
    begun_with: dict[str, Any] | None = None,
    show: bool = False,
) -> Iterator[Any]:
    """The batches of a loader that is not ours; each replica has those of its first rank.

    Args:
        loader: any iterable.
        layout: says who is a replica.
        first_round: batches that are read and left out.
        begun_with: state of the generators when the epoch was begun, for an epoch that is gone on with.
        show: whether this process shows how far the reading is.
    """

    def read() -> Iterator[Any]:
        if begun_with is None and first_round == 0:
            batches = iter(loader)
        else:
            with as_if_at(begun_with):
                batches = iter(loader)
                skip(batches, first_round, "batches", show)
        yield from batches

    return replica_batches(
        read,
        replica_groups(layout),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        read_along=bool(getattr(loader, "_is_accelerate_prepared", False)),  # its ranks exchange random states
    )


def _read(source: Callable[[], Iterable[Any]], groups: ParallelGroups) -> Iterator[Any]:
    items: Iterator[Any] | None = None
    while True:
        try:
            with _random_states_of_data():
                if items is None:
                    items = iter(source())
                item = _Batch(next(items))
            send(item, groups.replica_host)
        except StopIteration:
            send(_End(), groups.replica_host)
            return
        except (Exception, SystemExit) as error:
            send(_End(f"{type(error).__name__}: {error}"), groups.replica_host)
            raise
        yield item.value


def _listen(
    groups: ParallelGroups, during: Callable[[Any], AbstractContextManager[Any]], pin_memory: bool
) -> Iterator[Any]:
    while True:
        _seed_of_data()
        item = receive(groups.replica_host, pin_memory)
        if isinstance(item, _End):
            if item.failed is None:
                return
            reader = groups.layout.rank_at(dp=groups.place.dp)
            raise PeerFailure(
                f"rank {reader}, which reads the data of replica {groups.place.dp}, failed with {item.failed}. Its "
                "traceback is in that rank's output."
            )
        with during(item.value):
            yield item.value


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
    """Inside, random numbers are the data's own; outside, every rank has drawn one number and no more."""
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

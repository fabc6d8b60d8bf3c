"""A process group in which this process is rank 0 of any number of ranks, and the only one that exists.

The backend is torch's fake one: collectives return at once, as if all ranks had the same values. The rendezvous store
is a TCP store in this process. So rank 0 makes the groups of a large job, and decides and checks as it would there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ds_trainer.engine.process_group import start_process_group, stop_process_group
from ds_trainer.utils import distributed
from ds_trainer.utils.ranks import without_launcher

_STORE_TIMEOUT = timedelta(seconds=30)


@dataclass
class MadeGroups:
    """The process groups that this rank has made besides the default one.

    Attributes:
        groups: how many.
        members: the number of their ranks, in total.
    """

    groups: int = 0
    members: int = 0


@contextmanager
def fake_process_group(ranks: int, local_ranks: int) -> Iterator[MadeGroups]:
    """Inside, this process is rank 0 of ``ranks``, of which ``local_ranks`` are on this machine.

    Environment and process group are restored at the end. DeepSpeed keeps its reference to the group, so a process can
    enter this once, and not after it had another process group.
    """
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend
    from torch._C._distributed_c10d import TCPStore

    c10d: Any = dist.distributed_c10d
    store = TCPStore("127.0.0.1", 0, None, True, _STORE_TIMEOUT, wait_for_workers=False)
    before = dict(os.environ)
    environment = without_launcher(before) | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(local_ranks),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    made = MadeGroups()
    make_group = c10d._new_process_group_helper

    def fake_group(size: int, rank: int, members: list[int], backend: Any, *rest: Any, **named: Any) -> Any:
        if members:  # not the default group
            made.groups += 1
            made.members += len(members)
        return make_group(size, rank, members, "fake", *rest, **named)  # gloo too, for tensors in host memory

    gather = distributed.gather_to_main
    _set_environment(environment)
    distributed.gather_to_main = lambda value: [value] * ranks  # the fake backend gathers zeros
    c10d._new_process_group_helper = fake_group
    try:
        dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
        start_process_group("cpu")
        yield made
    finally:
        distributed.gather_to_main = gather
        c10d._new_process_group_helper = make_group
        stop_process_group()
        _set_environment(before)


def _set_environment(names: dict[str, str]) -> None:
    for name in os.environ.keys() - names.keys():
        del os.environ[name]
    os.environ.update(names)

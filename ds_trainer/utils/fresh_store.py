"""A rendezvous store without what ranks of an earlier attempt left in it.

``torchrun --max-restarts`` starts all ranks again when one has died, and (torch 2.13) they meet in the same store: that
of the launcher, without a prefix. Whoever comes first then reads where the dead ranks listened, and cannot connect; or
takes a word of theirs, that they failed for instance, for one of today. The number of the attempt is no prefix that all
ranks know: every machine's launcher counts its own.

So the ranks agree on a name that is new, in the old store, where everything that is read may be of dead ranks:

* each rank draws a word and writes it down;
* rank 0 makes a name for the words that it finds, another one whenever it finds others, and leaves it below each word;
* a rank that finds a name below its own word is counted below that name: dead ranks cannot have been counted there;
* when all have, rank 0 says below the same name that it holds.

Only rank 0 reads and writes something for each rank.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_PREFIX = "ds_trainer/attempt"
_POLL_SECONDS = 0.01, 0.5  # at first, and at most


def outlives_ranks(environment: Mapping[str, str]) -> bool:
    """Whether the store is that of a launcher which may start ranks again."""
    return environment.get(_AGENT_STORE) == "True"


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """The store that the environment's variables tell of, below a name of this attempt. Collective.

    Raises:
        TimeoutError: not all ranks came.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    name = agree_on_name(store, rank, world_size, timeout.total_seconds())
    return PrefixStore(f"{_PREFIX}/{name}", store)


def agree_on_name(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """A name that no earlier ranks of ``store`` had. Collective.

    Raises:
        TimeoutError: not all ranks came within ``seconds``.
    """
    own = uuid.uuid4().hex
    store.set(f"{_PREFIX}/word/{rank}", own)
    deadline, (pause, longest) = time.monotonic() + seconds, _POLL_SECONDS
    name, found = "", list[str]()
    words = [f"{_PREFIX}/word/{one}" for one in range(world_size)] if rank == 0 else []
    while time.monotonic() < deadline:
        if rank == 0 and store.check(words):
            present = [word.decode() for word in store.multi_get(words)]
            if present != found:
                found, given = present, uuid.uuid4().hex
                for word in found:
                    store.set(f"{_PREFIX}/name/{word}", given)
        if store.check([f"{_PREFIX}/name/{own}"]):
            given = store.get(f"{_PREFIX}/name/{own}").decode()
            if given != name:
                name = given
                store.add(f"{_PREFIX}/{name}/agreed", 1)
            if rank == 0 and store.add(f"{_PREFIX}/{name}/agreed", 0) == world_size:
                store.set(f"{_PREFIX}/{name}/holds", "")
            if store.check([f"{_PREFIX}/{name}/holds"]):
                return name
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    raise TimeoutError(f"rank {rank} of {world_size} waited {seconds:.0f} s for the other ranks")

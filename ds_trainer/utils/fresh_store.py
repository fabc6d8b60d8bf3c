"""A rendezvous store without the values of an earlier attempt.

``torchrun --max-restarts`` restarts all ranks when one has died, and (torch 2.13) they use the same store, that of the
launcher, without a prefix. The first ranks to arrive then read the addresses of dead ranks and cannot connect, or take
an old value, such as a reported failure, for a new one. The number of the attempt cannot serve as a prefix, because the
launcher of every machine counts its own attempts.

So the ranks agree on a new name in the old store, in which any value may be that of a dead rank:

* each rank writes a random token;
* rank 0 creates a name for the tokens that it finds, a new one whenever they change, and writes it under each token;
* a rank that finds a name under its own token counts itself under that name, where dead ranks cannot have counted;
* once all ranks have, rank 0 confirms the name under the same name.

Only rank 0 reads and writes a value for each rank.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ds_trainer.utils.store import pause_of

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_PREFIX = "ds_trainer/attempt"
_POLL_SECONDS = 0.01, 0.5  # first and longest pause
_OPERATIONS = 3  # of the store at each poll of a rank


def outlives_ranks(environment: Mapping[str, str]) -> bool:
    """Whether the store belongs to a launcher that may restart ranks."""
    return environment.get(_AGENT_STORE) == "True"


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """The store that the environment variables name, below a prefix of this attempt. Collective.

    Raises:
        TimeoutError: not all ranks arrived.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    name = agree_on_name(store, rank, world_size, timeout.total_seconds())
    return PrefixStore(f"{_PREFIX}/{name}", store)


def agree_on_name(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """A name that no earlier attempt in ``store`` has used. Collective.

    Raises:
        TimeoutError: not all ranks arrived within ``seconds``.
    """
    token = uuid.uuid4().hex
    store.set(f"{_PREFIX}/token/{rank}", token)
    deadline, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
    longest = pause_of(_OPERATIONS * world_size, _POLL_SECONDS[1])
    name, found = "", list[str]()
    keys = [f"{_PREFIX}/token/{one}" for one in range(world_size)] if rank == 0 else []
    while time.monotonic() < deadline:
        if rank == 0 and store.check(keys):
            present = [value.decode() for value in store.multi_get(keys)]
            if present != found:
                found, given = present, uuid.uuid4().hex
                for other in found:
                    store.set(f"{_PREFIX}/name/{other}", given)
        if store.check([f"{_PREFIX}/name/{token}"]):
            given = store.get(f"{_PREFIX}/name/{token}").decode()
            if given != name:
                name = given
                store.add(f"{_PREFIX}/{name}/agreed", 1)
            if rank == 0 and store.add(f"{_PREFIX}/{name}/agreed", 0) == world_size:
                store.set(f"{_PREFIX}/{name}/confirmed", "")
            if store.check([f"{_PREFIX}/{name}/confirmed"]):
                return name
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
    raise TimeoutError(f"rank {rank} of {world_size} waited {seconds:.0f} s for the other ranks")

"""Generation by several ranks of one replica (tensor, context or sequence parallelism): same prompts, same draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch

from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.seeds import random_state, restore_random_state


@contextmanager
def same_draws(groups: ParallelGroups, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, all ranks of a replica draw the random numbers of its first rank, whose generators go on afterwards.

    Collective over the ranks of the replica; does nothing if a replica is one rank.

    Args:
        groups: the process groups of the layout.
        inputs: arguments of ``generate``; its integer tensors (tokens, masks) must be the same on these ranks.

    Raises:
        ConfigError: they are not.
    """
    if groups.layout.replica_size == 1:
        yield
        return
    own = random_state()
    reports: list[Any] = [None] * groups.layout.replica_size
    torch.distributed.all_gather_object(reports, (_checksum(inputs), own), group=groups.replica_host)
    if len({checksum for checksum, _ in reports}) > 1:
        raise ConfigError(
            f"generate was called with different prompts on the ranks of a replica ({groups.layout.describe()}), which "
            "generate together. Inside a training step with sequence sharding, a batch is only the shard of a rank: "
            "generate from prompts that all of them have, for example in get_batch_samples or a callback."
        )
    first = torch.distributed.get_rank(groups.replica_host) == 0
    restore_random_state(reports[0][1])
    try:
        yield
    finally:
        if not first:
            restore_random_state(own)


def _checksum(inputs: Sequence[Any]) -> int:
    found = 0
    for value in inputs:
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            data = value.detach().to("cpu", torch.int64).contiguous()
            found = crc32(f"{list(data.shape)}".encode() + data.numpy().tobytes(), found)
    return found

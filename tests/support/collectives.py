"""Counts how often ranks meet: ZeRO's gatherings of weights, layer by layer and in contexts, and sums."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist


class Collectives:
    """Inside, counts DeepSpeed's gatherings for a layer (``_dist_allgather_fn``) and in a ``GatheredParameters``
    (``all_gather_into_tensor``, one for each parameter), and all-reduces.
    """

    def __enter__(self) -> Counter[str]:
        from deepspeed import comm
        from deepspeed.runtime.zero import partition_parameters

        self.found: Counter[str] = Counter()
        patched: list[tuple[Any, str]] = [
            (partition_parameters, "_dist_allgather_fn"),
            (comm, "all_gather_into_tensor"),
            (dist, "all_reduce"),
        ]
        self.before = [(owner, name, getattr(owner, name)) for owner, name in patched]
        for owner, name, function in self.before:
            setattr(owner, name, self._counted(name, function))
        return self.found

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **keywords: Any) -> Any:
            self.found[name] += 1
            return function(*args, **keywords)

        return counted

    def __exit__(self, *error: Any) -> None:
        for owner, name, function in self.before:
            setattr(owner, name, function)

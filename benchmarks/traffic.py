"""Counts what a rank sends: wraps torch.distributed's collectives while a context is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# Bytes that a rank sends in a bandwidth-optimal algorithm, of a tensor of ``size`` bytes handed in, among ``n`` ranks.
_SENT: dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) / n,
    "all_gather_into_tensor": lambda size, n: size * (n - 1),
    "reduce_scatter_tensor": lambda size, n: size * (n - 1) / n,
    "all_to_all_single": lambda size, n: size * (n - 1) / n,
    "broadcast": lambda size, n: size * (n - 1) / n,
}
_IS_SECOND = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}  # (output, input, ...)


@contextmanager
def traffic() -> Iterator[Counter[str]]:
    """Inside, the counter grows by the bytes that this rank sends, by name of the collective."""
    sent: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor)]
            tensor = tensors[1] if name in _IS_SECOND else tensors[0]
            ranks = dist.get_world_size(kwargs.get("group"))
            sent[name] += round(_SENT[name](tensor.numel() * tensor.element_size(), ranks))
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _SENT:
            stack.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))
        batched = dist.batch_isend_irecv

        def count_batched(operations: list[Any]) -> Any:
            for operation in operations:
                if operation.op is dist.isend:
                    sent["isend"] += operation.tensor.numel() * operation.tensor.element_size()
            return batched(operations)

        stack.enter_context(patch.object(dist, "batch_isend_irecv", count_batched))
        yield sent

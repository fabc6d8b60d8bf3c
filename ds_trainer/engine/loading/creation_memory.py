"""A ZeRO-3 engine is made in the memory that it then holds: what DeepSpeed takes beside it for a moment is spared.

DeepSpeed 0.19.8 (``runtime/zero/stage3.py``) makes the engine of a rank's shards in this order:

* ``defragment`` moves the shards into one buffer. What they leave behind in host memory stays on glibc's heap, where
  everything below a threshold lies that grows up to 32 MiB. Here it goes back to the operating system.
* ``_create_fp32_partitions`` makes the masters, converted and then copied once more. Here what has just been converted
  is the copy.
* ``initialize_optimizer_states`` makes a gradient in the type of the masters, and lets it go. Only an Adagrad and
  optimizers in other memory need it; for others it is left out.
* ``create_reduce_and_remove_grad_hooks`` gathers every parameter, one after the other, to put a hook on it, and cuts it
  again: the whole model over the network. ``register_post_accumulate_grad_hook`` needs no elements. Here shards stay.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def return_freed_memory() -> None:
    """Give the free pages of the heap back to the operating system. Takes milliseconds; only glibc needs it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # musl has none
            trim(0)


class _ConvertedOnce(TorchFunctionMode):
    """A clone of what ``Tensor.to`` has just made in new memory is that tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self._made: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and args[0] is self._made:
            return self._made
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to:
            self._made = None if result is args[0] else result
        return result


def _nothing() -> None:
    """In place of gathering a parameter and of cutting it again."""


@contextmanager
def bounded_creation() -> Iterator[None]:
    """While an engine is made; nothing changes at stages below 3."""
    from deepspeed.runtime.zero import stage3

    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    defragment: Callable[..., Any] = stage3.defragment
    make_masters, make_states = optimizer._create_fp32_partitions, optimizer.initialize_optimizer_states
    make_hooks = optimizer.create_reduce_and_remove_grad_hooks

    def in_one_buffer(tensors: Any) -> Any:
        buffer = defragment(tensors)
        return_freed_memory()
        return buffer

    def masters(self: Any) -> None:
        with _ConvertedOnce():
            make_masters(self)

    def states(self: Any) -> None:
        if self.swap_optimizer or self.offload_optimizer or isinstance(self.optimizer, torch.optim.Adagrad):
            make_states(self)

    def hooks(self: Any) -> None:
        parameters = [parameter for group in self.fp16_groups for parameter in group]
        kept = [(parameter.all_gather, parameter.partition) for parameter in parameters]
        for parameter in parameters:
            parameter.all_gather = parameter.partition = _nothing
        try:
            make_hooks(self)
        finally:
            for parameter, (gather, partition) in zip(parameters, kept, strict=True):
                parameter.all_gather, parameter.partition = gather, partition

    stage3.defragment = in_one_buffer
    optimizer.create_reduce_and_remove_grad_hooks = hooks
    optimizer._create_fp32_partitions, optimizer.initialize_optimizer_states = masters, states
    try:
        yield
    finally:
        stage3.defragment = defragment
        optimizer._create_fp32_partitions, optimizer.initialize_optimizer_states = make_masters, make_states
        optimizer.create_reduce_and_remove_grad_hooks = make_hooks
    return_freed_memory()

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

None of that changes a number. Where another DeepSpeed makes its engines in another way, a warning says what is not
spared.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)


def return_freed_memory() -> None:
    """Give the free pages of the heap back to the operating system. Takes milliseconds; only glibc needs it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # musl has none
            trim(0)


class _ConvertedOnce(TorchFunctionMode):
    """A clone of what ``Tensor.to`` has just made in new memory is that tensor itself; ``spared`` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.spared = 0
        self._made: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and args[0] is self._made:
            self.spared += 1
            return self._made
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to:
            self._made = None if result is args[0] else result
        return result


@contextmanager
def bounded_creation() -> Iterator[Counter[str]]:
    """While an engine is made; nothing changes at stages below 3.

    Yields:
        How often each of the four was spared, for :func:`check_creation`.
    """
    from deepspeed.runtime.zero import stage3

    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    spared: Counter[str] = Counter()

    def in_one_buffer(defragment: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(tensors: Any) -> Any:
            buffer = defragment(tensors)
            return_freed_memory()
            spared["defragment"] += 1
            return buffer

        return replaced

    def masters(make: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any) -> None:
            with _ConvertedOnce() as once:
                make(self)
            spared["_create_fp32_partitions"] += once.spared

        return replaced

    def states(make: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any) -> None:
            if _needs_states(self):
                make(self)
            else:
                spared["initialize_optimizer_states"] += 1

        return replaced

    def hooks(make: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any) -> None:
            parameters = [parameter for group in self.fp16_groups for parameter in group]
            kept = [(parameter.all_gather, parameter.partition) for parameter in parameters]

            def not_gathered() -> None:
                spared["create_reduce_and_remove_grad_hooks"] += 1

            for parameter in parameters:
                parameter.all_gather, parameter.partition = not_gathered, _not_cut
            try:
                make(self)
            finally:
                for parameter, (gather, partition) in zip(parameters, kept, strict=True):
                    parameter.all_gather, parameter.partition = gather, partition

        return replaced

    with ExitStack() as undo:
        _replace(undo, stage3, "defragment", in_one_buffer)
        _replace(undo, optimizer, "_create_fp32_partitions", masters)
        _replace(undo, optimizer, "initialize_optimizer_states", states)
        _replace(undo, optimizer, "create_reduce_and_remove_grad_hooks", hooks)
        yield spared
    return_freed_memory()


def check_creation(optimizer: Any, spared: Counter[str]) -> None:
    """Warn of what the creation of an engine has not been spared, as this DeepSpeed makes it in another way.

    Args:
        optimizer: the engine's.
        spared: of :func:`bounded_creation`.
    """
    import deepspeed
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return
    flat = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    wanted = {
        "defragment": (not optimizer.offload_param, "freed shards stay in host memory"),
        "_create_fp32_partitions": (
            any(low is not None and master.numel() and low.dtype != master.dtype for low, master in flat),
            "the largest group of master weights is in memory twice for a moment",
        ),
        "initialize_optimizer_states": (not _needs_states(optimizer), "a gradient of the largest group is made"),
        "create_reduce_and_remove_grad_hooks": (True, "every parameter is gathered once, over the network"),
    }
    lost = [f"{name} ({costs})" for name, (expected, costs) in wanted.items() if expected and not spared[name]]
    if lost:
        logger.warning(
            "DeepSpeed %s makes a ZeRO-3 engine in another way than 0.19.8, for which its memory is bounded: %s. The "
            "numbers are the same; the start needs more memory or time.",
            deepspeed.__version__,
            ", ".join(lost),
        )


def _replace(undo: ExitStack, owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name, None)
    if original is not None:  # check_creation tells where it is gone
        undo.callback(setattr, owner, name, original)
        setattr(owner, name, by(original))


def _needs_states(optimizer: Any) -> bool:
    return bool(
        optimizer.swap_optimizer or optimizer.offload_optimizer or isinstance(optimizer.optimizer, torch.optim.Adagrad)
    )


def _not_cut() -> None:
    """In place of cutting a parameter that was not gathered."""

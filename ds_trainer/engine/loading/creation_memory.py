"""Creates a ZeRO-3 engine without the temporary memory that DeepSpeed needs beyond the final engine.

DeepSpeed 0.19.8 (``runtime/zero/stage3.py``) creates the engine from a rank's shards in these steps:

* ``defragment`` moves the shards into one buffer. The freed host memory stays on glibc's heap, which holds allocations
  below a threshold that grows up to 32 MiB. Here it is returned to the operating system.
* ``_create_fp32_partitions`` creates the master weights by a conversion and a further copy. Here the converted tensor
  is used without the copy.
* ``initialize_optimizer_states`` creates a gradient in the dtype of the master weights and frees it. Only Adagrad and
  offloaded optimizers need it; for others the step is skipped.
* ``create_reduce_and_remove_grad_hooks`` gathers and partitions every parameter in turn to register a hook, which sends
  the whole model over the network. ``register_post_accumulate_grad_hook`` needs no elements, so here shards stay
  partitioned.

None of this changes a value. If another DeepSpeed version creates engines differently, a warning lists the savings that
do not apply.
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
    """Return free heap pages to the operating system. Takes milliseconds; only glibc needs it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # musl does not have it
            trim(0)


class _SkipCloneOfConversion(TorchFunctionMode):
    """A clone of a tensor that ``Tensor.to`` has just allocated returns that tensor; ``avoided`` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.avoided = 0
        self._made: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.clone and args[0] is self._made:
            self.avoided += 1
            return self._made
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to:
            self._made = None if result is args[0] else result
        return result


@contextmanager
def bounded_creation() -> Iterator[Counter[str]]:
    """Avoids temporary memory while an engine is created; changes nothing at stages below 3.

    Yields:
        How often each of the four steps was avoided, for :func:`check_creation`.
    """
    from deepspeed.runtime.zero import stage3

    optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
    avoided: Counter[str] = Counter()

    def in_one_buffer(defragment: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(tensors: Any) -> Any:
            buffer = defragment(tensors)
            return_freed_memory()
            avoided["defragment"] += 1
            return buffer

        return replaced

    def masters(make: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any) -> None:
            with _SkipCloneOfConversion() as mode:
                make(self)
            avoided["_create_fp32_partitions"] += mode.avoided

        return replaced

    def states(make: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any) -> None:
            if _needs_states(self):
                make(self)
            else:
                avoided["initialize_optimizer_states"] += 1

        return replaced

    def hooks(make: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(self: Any) -> None:
            parameters = [parameter for group in self.fp16_groups for parameter in group]
            originals = [(parameter.all_gather, parameter.partition) for parameter in parameters]

            def skip_gather() -> None:
                avoided["create_reduce_and_remove_grad_hooks"] += 1

            for parameter in parameters:
                parameter.all_gather, parameter.partition = skip_gather, _skip_partition
            try:
                make(self)
            finally:
                for parameter, (gather, partition) in zip(parameters, originals, strict=True):
                    parameter.all_gather, parameter.partition = gather, partition

        return replaced

    with ExitStack() as undo:
        _replace(undo, stage3, "defragment", in_one_buffer)
        _replace(undo, optimizer, "_create_fp32_partitions", masters)
        _replace(undo, optimizer, "initialize_optimizer_states", states)
        _replace(undo, optimizer, "create_reduce_and_remove_grad_hooks", hooks)
        yield avoided
    return_freed_memory()


def check_creation(optimizer: Any, avoided: Counter[str]) -> None:
    """Warn about temporary memory that could not be avoided because this DeepSpeed creates engines differently.

    Args:
        optimizer: the optimizer of the engine.
        avoided: the counts of :func:`bounded_creation`.
    """
    import deepspeed
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return
    flat = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    steps = {
        "defragment": (not optimizer.offload_param, "freed shards stay in host memory"),
        "_create_fp32_partitions": (
            any(low is not None and master.numel() and low.dtype != master.dtype for low, master in flat),
            "the largest group of master weights is briefly in memory twice",
        ),
        "initialize_optimizer_states": (not _needs_states(optimizer), "a gradient of the largest group is allocated"),
        "create_reduce_and_remove_grad_hooks": (True, "every parameter is gathered once over the network"),
    }
    not_avoided = [f"{name} ({cost})" for name, (expected, cost) in steps.items() if expected and not avoided[name]]
    if not_avoided:
        logger.warning(
            "DeepSpeed %s creates a ZeRO-3 engine differently from 0.19.8, whose memory use is bounded here: %s. "
            "Results "
            "are the same, but the start needs more memory or time.",
            deepspeed.__version__,
            ", ".join(not_avoided),
        )


def _replace(undo: ExitStack, owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name, None)
    if original is not None:  # check_creation reports if it does not exist
        undo.callback(setattr, owner, name, original)
        setattr(owner, name, by(original))


def _needs_states(optimizer: Any) -> bool:
    return bool(
        optimizer.swap_optimizer or optimizer.offload_optimizer or isinstance(optimizer.optimizer, torch.optim.Adagrad)
    )


def _skip_partition() -> None:
    """Replaces the partitioning of a parameter that was not gathered."""

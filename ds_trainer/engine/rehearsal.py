"""A rehearsal: forward and backward passes of micro-batches that take the memory of the real ones and nothing else.

Under ZeRO every rank takes part in collectives in the middle of both passes. A rank that runs out of memory there
leaves the others waiting, and what it has missed cannot be made up. So nobody communicates in a rehearsal: buffers are
allocated as always, but collectives leave in them what happens to be there. Losses and gradients are worthless; the
engine is thrown away afterwards, and buffers and random numbers are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import full_numel

_COLLECTIVES = frozenset(
    {
        *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_object", "all_reduce"),
        *("all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list"),
        *("gather", "inference_all_reduce", "irecv", "isend", "batch_isend_irecv", "monitored_barrier", "recv"),
        *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
    }
)
_BYTES_OF_STATES = 8  # of Adam, for each element that a rank updates: two float32 numbers


class _Done:
    """The handle of a collective that has nothing to do."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Silent:
    """DeepSpeed's backend without its collectives; all else (ranks, groups, sizes) is the real one's."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return _nothing if name in _COLLECTIVES else getattr(self._real, name)


def _nothing(*args: Any, **kwargs: Any) -> _Done:
    return _Done()


@contextmanager
def without_communication() -> Iterator[None]:
    """DeepSpeed's collectives do nothing inside; those of torch do what they always do."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    real, check = comm.cdb, coordinator.assert_ints_same_as_other_ranks
    comm.cdb = _Silent(real)
    coordinator.assert_ints_same_as_other_ranks = _nothing  # stage 3 compares its order of modules with rank 0's
    try:
        yield
    finally:
        comm.cdb = real
        coordinator.assert_ints_same_as_other_ranks = check


@contextmanager
def _put_back(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers (running means of norms) and random numbers are afterwards what they were."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])


def rehearse(engine: TrainingEngine, passes: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Run ``passes``, each forward and backward of one micro-batch, on ``engine``, which is of no use afterwards.

    Memory for the states of an Adam optimizer is taken meanwhile, since the first step will want it too.

    Raises:
        RuntimeError: what one of the passes raises; out of memory, for instance.
    """
    module: nn.Module = engine.deepspeed.module
    if engine.module_guard is not None:
        engine.module_guard.close()  # it would ask the other ranks
    with without_communication(), _put_back(module, device):
        try:
            states = torch.empty(_size_of_states(engine, module), dtype=torch.uint8, device=device)
            for index, one in enumerate(passes):
                engine.begin_micro_batch(last=index == len(passes) - 1)
                one()
            del states
        finally:
            for parameter in module.parameters():
                parameter.grad = None
            offload = getattr(engine.deepspeed.optimizer, "parameter_offload", None)
            if offload is not None:  # stage 3: no parameter may stay gathered, none be gathered by a look at it
                for part in module.modules():
                    part._parameters._in_forward = False  # type: ignore[attr-defined]  # of DeepSpeed's dictionary
                offload.partition_all_parameters()


def _size_of_states(engine: TrainingEngine, module: nn.Module) -> int:
    if engine.offloads_optimizer:
        return 0
    elements = sum(full_numel(p) for p in module.parameters() if p.requires_grad)
    shards = engine.layout.gradient_ranks if engine.stage > 0 else 1
    return elements * _BYTES_OF_STATES // shards

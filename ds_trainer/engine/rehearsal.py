"""A rehearsal: forward and backward passes without communication, which measure the memory of real micro-batches.

Under ZeRO every rank takes part in collectives in the middle of both passes. A rank that runs out of memory there
leaves the others waiting, and cannot rejoin. So there is no communication in a rehearsal: buffers are allocated as
usual, but collectives leave them uninitialized. Losses and gradients are meaningless; the engine is discarded
afterwards, and module buffers and random states are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import full_numel
from ds_trainer.parallel.expert_exchange import calls_through
from ds_trainer.utils.undisturbed import KeptBuffers

COLLECTIVES = frozenset(
    {
        *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_object", "all_reduce"),
        *("all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list"),
        *("gather", "inference_all_reduce", "irecv", "isend", "batch_isend_irecv", "monitored_barrier", "recv"),
        *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
    }
)
_STATE_BYTES = 8  # Adam's states per element: two float32 numbers


class _Done:
    """The handle of a collective that does nothing."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Silent:
    """DeepSpeed's backend without its collectives; everything else (ranks, groups, sizes) is the real backend's."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return do_nothing if name in COLLECTIVES else getattr(self._real, name)


def do_nothing(*args: Any, **kwargs: Any) -> _Done:
    """In place of a collective."""
    return _Done()


@contextmanager
def without_communication() -> Iterator[None]:
    """Inside, DeepSpeed's collectives do nothing; torch's own collectives work as usual."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    real, check = comm.cdb, coordinator.assert_ints_same_as_other_ranks
    comm.cdb = _Silent(real)
    coordinator.assert_ints_same_as_other_ranks = do_nothing  # stage 3 compares its order of modules with rank 0's
    try:
        yield
    finally:
        comm.cdb = real
        coordinator.assert_ints_same_as_other_ranks = check


class _EvenRows:
    """Exchanges of experts without communication, as if this rank's rows were even over all experts."""

    completes = counts = False

    def call(self, name: str, function: Any, args: Any, kwargs: Any) -> None:
        """Other ranks have the counts of this one."""
        if name == "counts":
            arriving, own = args[0].view(-1, len(args[1])), args[1]
            experts = torch.arange(len(own) - 1, device=own.device)
            arriving[:, :-1], arriving[:, -1] = (own[:-1].sum() + experts) // len(experts), 2**62


@contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores buffers (such as running means) and random states on exit."""
    buffers = KeptBuffers(model.modules())
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            buffers.restore()


def rehearse(engine: TrainingEngine, passes: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Runs ``passes``, each the forward and backward pass of one micro-batch. ``engine`` is unusable afterwards.

    Also allocates the memory of Adam's states, which the first step will need.

    Raises:
        RuntimeError: from one of the passes, for example out of memory.
    """
    module: nn.Module = engine.deepspeed.module
    if engine.module_guard is not None:
        engine.module_guard.close()  # it would communicate
    with without_communication(), calls_through(_EvenRows()), _restored(module, device):
        try:
            states = torch.empty(_state_bytes(engine, module), dtype=torch.uint8, device=device)
            for index, run_pass in enumerate(passes):
                engine.begin_micro_batch(last=index == len(passes) - 1)
                run_pass()
            del states
        finally:
            for parameter in module.parameters():
                parameter.grad = None
            offload = getattr(engine.deepspeed.optimizer, "parameter_offload", None)
            if offload is not None:  # stage 3: release all parameters; attribute access must not gather them again
                for part in module.modules():
                    part._parameters._in_forward = False  # type: ignore[attr-defined]  # DeepSpeed's dict subclass
                offload.partition_all_parameters()


def _state_bytes(engine: TrainingEngine, module: nn.Module) -> int:
    if engine.offloads_optimizer:
        return 0
    elements = sum(full_numel(p) for p in module.parameters() if p.requires_grad)
    shards = engine.layout.seq_data_parallel_size if engine.stage > 0 else 1
    return elements * _STATE_BYTES // shards

"""``PassCompletion``: a rank whose pass was interrupted still takes part in the communication of the micro-batch.

Under ZeRO the ranks communicate in the middle of both passes. A rank that runs out of memory there would leave the
others waiting. So it runs the micro-batch again with less data, which needs the same collectives in the same order:
those that it has taken part in already do nothing this time, the rest are real. Its gradients are worthless afterwards,
and so are those of all ranks: all of them drop the step (:meth:`TrainingEngine.drop_step`).

Needs a known order of collectives: not the first step of ZeRO-3, in which DeepSpeed and the module guard record it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_trainer.engine.rehearsal import COLLECTIVES, do_nothing
from ds_trainer.engine.training_engine import TrainingEngine


class PassCompletion:
    """Counts the collectives of a micro-batch, and leaves out those that a rank has taken part in.

    Args:
        engine: runs the passes.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine
        self._done = 0  # collectives of this micro-batch
        self._left_out = 0  # of those, how many the next ones repeat

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Context of the passes of one micro-batch, including :meth:`restart`."""
        from deepspeed.comm import comm

        self._done = self._left_out = 0
        real = comm.cdb
        comm.cdb = _CountedBackend(real, self)
        try:
            yield
        finally:
            comm.cdb = real

    def restart(self) -> None:
        """After an interrupted pass: the next pass begins the micro-batch anew."""
        self._left_out, self._done = self._done, 0
        forget_pass(self._engine)
        self._engine.begin_micro_batch(last=self._engine.deepspeed.is_gradient_accumulation_boundary())

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a collective, or leave it out."""
        if self._left_out > self._done:
            self._done += 1
            return do_nothing()
        result = function(*args, **kwargs)
        self._done += 1
        return result


class _CountedBackend:
    """DeepSpeed's backend; its collectives are counted."""

    def __init__(self, real: Any, completion: PassCompletion) -> None:
        self._real = real
        self._completion = completion

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in COLLECTIVES:
            return found
        return lambda *args, **kwargs: self._completion.call(found, args, kwargs)


def forget_pass(engine: TrainingEngine) -> None:
    """Forget what an interrupted forward or backward pass has left in the engine, and all gradients of this rank."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    optimizer: Any = engine.deepspeed.optimizer
    for parameter in engine.deepspeed.module.parameters():
        parameter.grad = None  # it may be a view of a bucket
        if hasattr(parameter, "grad_accum"):
            parameter.grad_accum = None
    if engine.reduction_order is not None:
        engine.reduction_order.restart()
    if isinstance(optimizer, ZeROOptimizer):
        optimizer._backward_active_depth = 0
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            (bucket.clear_params if hasattr(bucket, "clear_params") else bucket.clear)()
        reduced = getattr(optimizer, "params_already_reduced", [])
        for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
            reduced[key] = False
    offload = getattr(optimizer, "parameter_offload", None)
    if offload is not None:
        _release_parameters(engine, offload.get_param_coordinator())
        if engine.module_guard is not None:
            engine.module_guard.restart_pass()


def _release_parameters(engine: TrainingEngine, coordinator: Any) -> None:
    """Release what ZeRO-3 has gathered. Small parameters stay, as they do between passes on the other ranks."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    module = engine.deepspeed.module
    coordinator.release_backward_leftovers()
    for part in module.modules():
        part._parameters._in_forward = False  # DeepSpeed's dict subclass: access must not gather a parameter
    for parameter in module.parameters():
        parameter.ds_active_sub_modules.clear()
    # Parameters in flight are awaited and released when the next forward pass begins.
    for parameter in module.parameters():
        if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
            parameter.partition()

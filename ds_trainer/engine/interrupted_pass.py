"""``PassCompletion``: a rank whose pass was interrupted still takes part in the communication of the micro-batch.

Under ZeRO the ranks communicate in the middle of both passes. A rank that runs out of memory there would leave the
others waiting. So it runs the micro-batch again with less data, which needs the same collectives in the same order:
those that it has taken part in already do nothing this time, the rest are real. Its gradients are worthless afterwards,
and so are those of all ranks: all of them drop the step (:meth:`TrainingEngine.drop_step`).

Under ZeRO-3 on several ranks, DeepSpeed and the module guard record the order of modules in the first micro-batches,
and compare it. A micro-batch that begins anew has the record that it began with. A rank alone need not complete
anything.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_trainer.engine.rehearsal import COLLECTIVES, do_nothing, without_communication
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.parallel.expert_exchange import calls_through

_TRACE = tuple(
    f"_PartitionedParameterCoordinator__{name}"
    for name in ("trace_mode", "submodule_order", "param_order", "step_id_module_fetched_for")
)

_KEPT = ("broadcast", "counts")  # with which DeepSpeed compares ranks, and of the rows that experts get


class PassCompletion:
    """Counts the collectives of a micro-batch, and leaves out those that a rank has taken part in.

    Args:
        engine: runs the passes.

    Attributes:
        alone: there are no other ranks.
        completes: whether this pass is for the other ranks only.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self.completes = False
        self._engine = engine
        self.alone = engine.layout.world_size == 1
        self._done = 0  # collectives of this micro-batch
        self._left_out = 0  # of an interrupted pass, which the next one repeats
        self._received: list[Any] = []  # of this micro-batch, by the collectives of _KEPT
        self._kept = 0  # of this pass
        self._parameters = _GatheredParameters(engine) if engine.stage == 3 else None

    @contextmanager
    def micro_batch(self, completes: bool) -> Iterator[None]:
        """Context of the passes of one micro-batch, including :meth:`restart`."""
        from deepspeed.comm import comm

        self.begin()
        real, self.completes = comm.cdb, completes
        comm.cdb = _CountedBackend(real, self)
        try:
            with calls_through(self):
                yield
        finally:
            comm.cdb = real

    @property
    def counts(self) -> bool:
        """Whether the pass is one of the training."""
        return not self.completes

    def begin(self) -> None:
        """All ranks are at the point from which a micro-batch begins anew."""
        self._done = self._left_out = self._kept = 0
        self._received = []
        if self._parameters is not None:
            self._parameters.begin()
        if self._engine.module_guard is not None:
            self._engine.module_guard.begin_micro_batch()

    def restart(self) -> None:
        """After an interrupted pass: the next pass begins the micro-batch anew."""
        self._left_out, self._done, self._kept = max(self._left_out, self._done), 0, 0
        self.completes = True
        _forget_gradients(self._engine)
        if self._parameters is not None:
            self._parameters.restore()
        if self._engine.module_guard is not None:
            self._engine.module_guard.restart_micro_batch()
        self._engine.begin_micro_batch(self._engine.is_last)

    def call(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Call the collective ``name``, or leave it out."""
        left_out = self._left_out > self._done
        result = do_nothing() if left_out else function(*args, **kwargs)
        self._done += 1
        if name in _KEPT:
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if left_out:
                tensor.copy_(self._received[self._kept])
            else:
                self._received.append(tensor.clone())
            self._kept += 1
        return result


class _CountedBackend:
    """DeepSpeed's backend; its collectives are counted."""

    def __init__(self, real: Any, completion: PassCompletion) -> None:
        self._real = real
        self._completion = completion

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._real, name)
        if name not in COLLECTIVES:
            return attribute
        return lambda *args, **kwargs: self._completion.call(name, attribute, args, kwargs)


def _forget_gradients(engine: TrainingEngine) -> None:
    """Forget the gradients of this rank, and what an interrupted backward pass has left of their reduction."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    optimizer: Any = engine.deepspeed.optimizer
    for parameter in engine.deepspeed.module.parameters():
        parameter.grad = None  # it may be a view of a bucket
        if hasattr(parameter, "grad_accum"):
            parameter.grad_accum = None
    engine.unused_parameters.interrupted()
    if isinstance(optimizer, ZeROOptimizer):
        optimizer._backward_active_depth = 0
        optimizer.grads_in_partition = None  # of ZeRO 1 and 2
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            (bucket.clear_params if hasattr(bucket, "clear_params") else bucket.clear)()
        reduced = getattr(optimizer, "params_already_reduced", [])
        for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
            reduced[key] = False


class _GatheredParameters:
    """Which parameters of a ZeRO-3 engine are gathered when a micro-batch begins, so that it can begin anew."""

    def __init__(self, engine: TrainingEngine) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._available = ZeroParamStatus.AVAILABLE
        self._module = engine.deepspeed.module
        self._parameters: list[Any] = list(self._module.parameters())
        self._coordinator = engine.deepspeed.optimizer.parameter_offload.get_param_coordinator()
        self._before: list[Any] = []
        self._trace: dict[str, Any] = {}

    def begin(self) -> None:
        self._before = [parameter for parameter in self._parameters if parameter.ds_status == self._available]
        self._trace = {name: vars(self._coordinator)[name] for name in _TRACE}
        if not self._coordinator.is_complete_trace():  # DeepSpeed adds to it and takes from it
            kept = {id(part): part for part in (*self._module.modules(), *self._parameters)}
            self._trace = copy.deepcopy(self._trace, kept)

    def restore(self) -> None:
        """Gather and release parameters until they are as they were; without communication, so without values."""
        for part in self._module.modules():
            part._parameters._in_forward = False  # DeepSpeed's dict subclass: access must not gather a parameter
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.clear()
        self._coordinator.release_backward_leftovers()
        self._coordinator._clean_inflight_param_registry()  # waits for the gathers that have begun
        vars(self._coordinator).update(self._trace)
        before = {id(parameter) for parameter in self._before}
        for parameter in self._parameters:
            if parameter.ds_status == self._available and id(parameter) not in before:
                parameter.partition()
        lost = [parameter for parameter in self._before if parameter.ds_status != self._available]
        if lost:
            with without_communication():
                lost[0].all_gather(param_list=lost)

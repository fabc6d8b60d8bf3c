"""Reduces gradients in the same order on all ranks, with zeros for a rank's missing gradients (ZeRO 1 and 2).

DeepSpeed 0.19.8 puts gradients into buckets in the order of the backward pass, without parameters that have no
gradient. A rank whose micro-batch does not use a module (a vision tower without images, an expert without tokens) then
reduces different buckets than the other ranks: the ranks hang, or add gradients of different parameters. Stage 0 fills
in zeros itself; at stage 3 this approach does not work (:mod:`ds_trainer.engine.zero3.module_guard`).

The order is the reverse of the parameters' order in the model, which is roughly the order of the backward pass, as in
PyTorch's ``DistributedDataParallel``. An early gradient waits for those before it: in a transformer until its layer is
done; if a module is unused, at most until the end of the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.engine.overlapped_reduction import OverlappedReduction, can_overlap
from ds_trainer.engine.seen_gradients import SeenGradients

_TWICE = (
    "The gradient of {name} was computed a second time in one backward pass, after its reduction had begun. With "
    "use_reentrant=True, checkpointing computes the gradients of each block alone; set use_reentrant=False, or use the "
    "parameter in one block only."
)


def reduce_in_fixed_order(engine: Any, overlaps: bool) -> FixedOrder | None:
    """Makes DeepSpeed's ``engine`` reduce the gradients of all trainable parameters in the same order on all ranks.

    Args:
        engine: DeepSpeed's engine.
        overlaps: whether gradients are reduced while the backward pass runs, where that is possible.

    Returns:
        The queue that does so; None if there is none.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if type(optimizer) is DeepSpeedZeroOptimizer:
        order = FixedOrder(optimizer, engine.module, overlaps)
        order.install()
        return order
    return None


class FixedOrder(SeenGradients):
    """The reduction queue of one optimizer: a parameter is reduced after all parameters before it."""

    def __init__(self, optimizer: Any, model: nn.Module, overlaps: bool) -> None:
        self._optimizer = optimizer
        from deepspeed import comm

        self._reduction: OverlappedReduction | None = None
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        if comm.get_world_size(group=optimizer.dp_process_group) > 1 and can_overlap(optimizer):
            self._reduction = OverlappedReduction(optimizer, overlaps)
        self._early = overlaps and self._reduction is not None and not optimizer.partition_gradients
        groups = {id(p): index for index, group in enumerate(optimizer.bit16_groups) for p in group}
        ordered = [p for p in model.parameters() if id(p) in groups and p.requires_grad]
        self._queue = [(p, groups[id(p)]) for p in reversed(ordered)]
        super().__init__([p for p, _ in self._queue])
        self._index = {id(p): index for index, (p, _) in enumerate(self._queue)}
        self.restart()
        self._reduce = optimizer.reduce_independent_p_g_buckets_and_remove_grads
        self._finish = optimizer.overlapping_partition_gradients_reduce_epilogue

    def restart(self) -> None:
        """Wait for the first gradient of a backward pass."""
        self._arrived = bytearray(len(self._queue) + 1)  # the last one, which never arrives, ends the loop over them
        self._next = 0

    def interrupted(self) -> None:
        """See :class:`SeenGradients`."""
        super().interrupted()
        self.restart()
        if self._reduction is not None:
            self._reduction.drop()

    def install(self) -> None:
        """Take the place of the two methods of DeepSpeed's optimizer."""
        self._optimizer.reduce_independent_p_g_buckets_and_remove_grads = self._arrives
        self._optimizer.overlapping_partition_gradients_reduce_epilogue = self._complete
        if self._early:
            self._optimizer.process_gradients = self._ready
            self._optimizer.reduce_gradients = lambda pipeline_parallel=False: self._complete()

    @property
    def _reduces_now(self) -> bool:
        """Whether gradients of this micro-batch are reduced: stage 1 reduces at the end of a step only."""
        return bool(self._optimizer.partition_gradients or self._optimizer.is_gradient_accumulation_boundary())

    def _ready(self, parameter: Any, group: int) -> None:
        """DeepSpeed's ``process_gradients`` of stage 1, which also reduces in the last micro-batch of a step."""
        optimizer = self._optimizer
        if optimizer._coalesce_grad_reduction:
            return
        optimizer.setup_buckets()
        if optimizer.use_grad_accum_attribute:
            optimizer._fill_param_grad_accum_attribute(parameter)
        if optimizer._is_gradient_accumulation_boundary:
            self._arrives(parameter, group)

    def _arrives(self, parameter: torch.Tensor, group: int) -> None:
        """Called when the gradient of ``parameter`` is ready and reduced now: for each of them, so it is short."""
        if not getattr(parameter, "ds_grad_is_ready", True):  # a tiled gradient is incomplete
            return
        index = self._index[id(parameter)]
        if index < self._next:
            raise RuntimeError(_TWICE.format(name=self._names[id(parameter)]))
        arrived, queue = self._arrived, self._queue
        arrived[index] = 1
        while arrived[self._next]:
            self._next += 1
            self._reduce(*queue[self._next - 1])

    def _complete(self) -> None:
        """Called after the backward pass: reduces zeros for the parameters without a gradient on this rank."""
        optimizer = self._optimizer
        if self._reduces_now:
            optimizer.setup_buckets()  # otherwise done by the first gradient
            unseen = set()
            for index, (parameter, group) in enumerate(self._queue[self._next :], self._next):
                if optimizer.get_gradient_for_reduction(parameter) is None:  # nor from an earlier micro-batch
                    unseen.add(index)
                    self._fill(parameter)
                self._reduce(parameter, group)
            self.passed(unseen)
            self.restart()
        self._finish()

    def _fill(self, parameter: Any) -> None:
        optimizer = self._optimizer
        if optimizer.use_grad_accum_attribute:
            parameter.grad_accum = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
        else:
            parameter.grad = torch.zeros_like(parameter)

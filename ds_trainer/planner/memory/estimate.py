"""The memory of a rank as its largest moment.

A step is a row of moments: the end of the forward pass, the loss, the backward pass of the last and of the first
layer, the optimizer step. Each has its own items, and the largest one decides whether a run fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.elements import Elements, elements_of
from ds_trainer.planner.memory.micro_batch import MicroBatch, micro_batch
from ds_trainer.planner.memory.model_states import model_states
from ds_trainer.planner.memory.moments import Moment, moments_of_a_run
from ds_trainer.planner.planned_model import PlannedModel

CONTEXT = 0.6e9
"""Bytes of a CUDA context with the kernels that a transformer loads."""

COMMUNICATOR = 0.25e9
"""Bytes of the buffers of one NCCL communicator inside of a machine."""

FRAGMENTATION = 0.04
"""Share of the largest moment that the allocator reserves beyond the tensors."""

_HOST_BASE = 4e9  # Python with torch and DeepSpeed, data, pinned staging buffers


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank.

    Attributes:
        moments: in the order of a step.
        overhead: bytes of a device that no tensor uses: context, communicators, fragmentation.
        host: bytes of host memory.
        checkpoint: bytes of a checkpoint on the disk, of all ranks.
    """

    moments: tuple[Moment, ...]
    overhead: Mapping[str, float]
    host_items: Mapping[str, float]
    checkpoint: float

    @cached_property
    def peak(self) -> Moment:
        """The largest moment."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def tensors(self) -> float:
        """Bytes of tensors at the largest moment."""
        return self.peak.total

    @cached_property
    def device(self) -> float:
        """Bytes of a device."""
        return self.peak.total + sum(self.overhead.values())

    @cached_property
    def host(self) -> float:
        """Bytes of host memory."""
        return sum(self.host_items.values())


def estimate_memory(
    model: PlannedModel, run: Candidate, elements: Elements | None = None, batch: MicroBatch | None = None
) -> MemoryEstimate:
    """Memory of the rank that needs most.

    Args:
        model: what is trained.
        run: how.
        elements: :func:`elements_of` the model and ``run.tp``, if they are known.
        batch: :func:`micro_batch` of the model and ``run``, if it is known.
    """
    elements = elements_of(model, run.tp) if elements is None else elements
    states, host = model_states(elements, run)
    batch = micro_batch(model, run) if batch is None else batch
    moments = moments_of_a_run(states, batch, elements, run, model.stack.layers)
    peak = max(moment.total for moment in moments)
    groups = 1 + (run.tp > 1) + (run.cp > 1) + (run.sp > 1)
    overhead = {
        "CUDA context": CONTEXT,
        "communicators": COMMUNICATOR * groups if run.world_size > 1 else 0.0,
        "fragmentation": FRAGMENTATION * peak,
    }
    checkpoint = run.state_bytes * model.trainable + model.weight_bytes(run.weight_bytes)
    if run.weight_bytes == 2:
        checkpoint += 4.0 * model.trainable  # the masters; float32 weights are their own
    host_items = {**host, "process": _HOST_BASE, "snapshot of a save": 12 * elements.trainable / run.shards}
    if batch.offloaded:
        host_items["activations"] = batch.offloaded
    return MemoryEstimate(moments, overhead, host_items, checkpoint)

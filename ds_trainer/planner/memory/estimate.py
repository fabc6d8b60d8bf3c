"""The memory of a rank as its largest moment.

A step is a row of moments: the end of the forward pass, the loss, the backward pass of the last and of the first
layer, the optimizer step. Each has its own items, and the largest one decides whether a run fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.cluster import Cluster
from ds_trainer.planner.memory.elements import Elements, elements_of, with_buckets
from ds_trainer.planner.memory.micro_batch import MicroBatch, micro_batch
from ds_trainer.planner.memory.moments import MOMENTS, Items, Moment, SharedItems, activation_items, shared_items
from ds_trainer.planner.offload_sizes import (
    OPTIMIZER_BUFFERS,
    PARAM_BUFFERS,
    PARAMS_IN_HOST,
    SUB_GROUP,
    param_buffer,
)
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

    Args:
        shared: everything but activations.
        batch: activations.
        groups: groups of ranks that the rank communicates in.
        checkpoint: bytes of a checkpoint on the disk, of all ranks.
        factor: measured / predicted bytes of tensors in earlier runs.
        context: bytes of a device that no tensor uses.
        fragmentation: share of the largest moment that the allocator reserves beyond the tensors.
    """

    shared: SharedItems
    batch: MicroBatch
    groups: int
    checkpoint: float
    factor: float = 1.0
    context: float = CONTEXT
    fragmentation: float = FRAGMENTATION

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Tensors on the device at each moment, in the order of a step."""
        moments = []
        for name, own, others in zip(MOMENTS, self._activations(), self.shared.at, strict=True):
            items = {**self.shared.states, **own, **others}
            moments.append(Moment(name, {item: size * self.factor for item, size in items.items() if size > 0}))
        return tuple(moments)

    @cached_property
    def peak(self) -> Moment:
        """The largest moment."""
        return max(self.moments, key=lambda moment: moment.total)

    @cached_property
    def tensors(self) -> float:
        """Bytes of tensors at the largest moment."""
        own = (sum(items.values()) for items in self._activations())
        return self.factor * max(map(add, self.shared.totals, own))

    @property
    def overhead(self) -> dict[str, float]:
        """Bytes of a device that no tensor uses: context, communicators, fragmentation."""
        return {
            "CUDA context": self.context,
            "communicators": COMMUNICATOR * self.groups,
            "fragmentation": self.fragmentation * self.tensors,
        }

    @cached_property
    def device(self) -> float:
        """Bytes of a device."""
        return self.tensors + sum(self.overhead.values())

    @property
    def host_items(self) -> dict[str, float]:
        """Bytes of host memory by name."""
        return {**self.shared.host, **({"activations": self.batch.offloaded} if self.batch.offloaded else {})}

    @property
    def host(self) -> float:
        """Bytes of host memory."""
        return sum(self.shared.host.values()) + self.batch.offloaded

    @property
    def nvme(self) -> float:
        """Bytes on the local disks of the machine."""
        return sum(self.shared.nvme.values())

    def _activations(self) -> tuple[Items, ...]:
        return activation_items(self.batch, self.shared.after_reduction)


class MemoryEstimator:
    """Estimates runs of one model. What several of them share is evaluated once.

    Args:
        model: what is trained.
        cluster: the machines, which determine sizes of buckets; None if they are not known.
    """

    def __init__(self, model: PlannedModel, cluster: Cluster | None = None) -> None:
        self.model = model
        self._cluster = cluster
        probe = model.probe
        slack = {} if probe is None else {"context": probe.context, "fragmentation": probe.fragmentation}
        self._slack = {name: value for name, value in slack.items() if value is not None}
        self._elements: dict[tuple[int, int], Elements] = {}
        self._shared: dict[tuple[object, ...], SharedItems] = {}
        self._batches: dict[tuple[object, ...], MicroBatch] = {}

    def estimate(self, run: Candidate) -> MemoryEstimate:
        """Memory of the rank that needs most.

        Args:
            run: how the model is trained.
        """
        groups = 1 + (run.tp > 1) + (run.cp > 1) + (run.sp > 1) + 2 * (run.ep > 1) if run.world_size > 1 else 0
        checkpoint = run.state_bytes * self.model.trainable + self.model.weight_bytes(run.weight_bytes)
        if run.weight_bytes == 2:
            checkpoint += 4.0 * self.model.trainable  # the masters; float32 weights are their own
        return MemoryEstimate(self._shared_items(run), self._micro_batch(run), groups, checkpoint, **self._slack)

    def _shared_items(self, run: Candidate) -> SharedItems:
        numbers = (run.precision, run.gradient_bytes, run.state_bytes, run.accumulation == 1, run.one_pass)
        offload = (run.offload_optimizer, run.offload_param, run.optimizer_on_nvme, run.param_on_nvme)
        features = (*offload, run.checkpointing, run.every_n_layers)
        key = (run.world_size, run.tp, run.ep, run.cp * run.sp > 1, run.stage, run.hpz, numbers, features)
        items = self._shared.get(key)
        if items is None:
            elements = self._elements.get((run.tp, run.ep))
            if elements is None:
                elements = self._elements[run.tp, run.ep] = elements_of(self.model, run.tp, run.ep)
            elements = with_buckets(elements, self.model.stack.hidden_size, run, self._cluster)
            states, host = model_states(elements, run)
            host["process"] = _HOST_BASE
            if not run.optimizer_on_nvme:  # those are written sub-group by sub-group, while the run waits
                file = run.weight_bytes * elements.trainable if self.model.adapters else 0  # of adapters
                ranks = run.shards if run.stage == 3 else 1
                host["snapshot of a save"] = 12 * elements.whole_trainable / run.shards + file / ranks
            items = shared_items(states, host, elements, run, self.model.stack.layers)
            items = self._shared[key] = replace(items, nvme=nvme_states(elements, run))
        return items

    def _micro_batch(self, run: Candidate) -> MicroBatch:
        sizes = (run.length, run.micro_batch, run.eval_micro_batch, run.tp, run.cp, run.sp, run.ep)
        features = (run.checkpointing, run.every_n_layers, run.chunked_loss, run.tiled_mlp, run.offload_activations)
        key = (*sizes, *features, run.attention, run.precision)
        items = self._batches.get(key)
        if items is None:
            items = self._batches[key] = micro_batch(self.model, run)
        return items


def estimate_memory(model: PlannedModel, run: Candidate, cluster: Cluster | None = None) -> MemoryEstimate:
    """Memory of the rank that needs most, for one run. For many runs of a model: :class:`MemoryEstimator`.

    Args:
        model: what is trained.
        run: how.
        cluster: the machines; None if they are not known.
    """
    return MemoryEstimator(model, cluster).estimate(run)


# Model states of a rank between two steps: weights, gradients, float32 masters, optimizer states, buffers of ZeRO.
#
# With ``n`` elements of the model on a rank (a slice with tensor parallelism), ``t`` of them trained, ``W`` ranks that
# share them, ``w`` bytes of a weight and ``B`` elements of ``reduce_bucket_size``, DeepSpeed 0.19.8 holds, in bytes::
#
#     stage 0       w n  +  (4 t masters, if w is 2)  +  8 t
#     stages 1, 2   w n  +  4 t / W  +  8 t / W
#     stage 3       w n / W  +  w t / W (gradients)  +  4 t / W  +  8 t / W  +  w B  +  w x persistent elements
#
#     hpZ           w n / (ranks of hpZ), from the first forward pass to the optimizer step, beside the weights
#
#     optimizer offloaded, in host memory in addition
#     stages 1, 2   4 t / W (gradients)  +  w t / W (the updated weights)  +  w x largest parameter (also on the device)
#     stage 3       4 t / W (gradients)
#
#     optimizer on NVMe: on the disk, for each rank, 4 t / W (masters) + 8 t / W + 4 t / W (gradients); in host memory
#     the gradients in the dtype of accumulation, and 4 buffers of 4 bytes x the largest sub-group
#
#     weights on NVMe: on the disk w n / W; in host memory the first 10**9 elements of them, 5 buffers of w x the
#     largest shard, and if there are more elements, one of W x w x the largest sub-group: its parameters as a whole
#
# Source: allocations of DeepSpeed's engines, counted in ``benchmarks/plan_memory.py``; the constructors in
# ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``; for NVMe ``runtime/swap_tensor/partitioned_optimizer_swapper.py``
# (``swap_in_optimizer_state``), ``partitioned_param_swapper.py`` (``_configure_aio``,
# ``reserve_partitioned_swap_space``), ``stage3.py`` (``_create_param_groups_fp16_flat_cpu_memory``).


def model_states(elements: Elements, run: Candidate) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes between two steps, on the device and in host memory.

    Args:
        elements: the numbers of elements of this rank.
        run: stage, offload, precision and ranks.
    """
    width, shards = run.weight_bytes, run.zero_shards
    trained = elements.trained_of(shards)
    device: dict[str, float] = {}
    host: dict[str, float] = {}
    states = host if run.offload_optimizer else device
    if run.stage == 3:
        weights = host if run.offload_param else device
        weights["weights"] = width * elements.held_of(shards)
        if run.param_on_nvme:
            weights["weights"] = width * min(PARAMS_IN_HOST, trained)
            host["weight buffers"] = width * PARAM_BUFFERS * param_buffer(elements.largest_matrix, shards)
            if trained > PARAMS_IN_HOST:
                host["buffer of updated weights"] = width * largest_sub_group(elements, run) * shards
        if shards > 1:
            device["weights that are not sharded"] = width * elements.persistent
        if run.hpz > 1:
            weights["second shards of weights"] = width * elements.total / run.hpz
        states["gradients"] = run.gradient_bytes * trained
        device["reduction bucket"] = width * elements.bucket
    else:
        device["weights"] = width * elements.total + elements.quantized
    if run.optimizer_on_nvme:
        host["optimizer buffers"] = 4 * OPTIMIZER_BUFFERS * largest_sub_group(elements, run)
        return device, host
    if run.stage or width == 2:
        states["master weights"] = 4 * trained
    states["optimizer states"] = run.state_bytes * trained
    if run.offload_optimizer:
        host["float32 gradients"] = 4 * trained
        if run.stage < 3:
            if run.stage == 2 and run.accumulation > 1:
                host["accumulated gradients"] = width * trained
            host["updated weights"] = width * trained
            host["staged gradient"] = device["staged gradient"] = width * elements.largest
    return device, host


def nvme_states(elements: Elements, run: Candidate) -> dict[str, float]:
    """Bytes of a rank's files on local disks.

    Args:
        elements: the numbers of elements of this rank.
        run: stage, offload, precision and ranks.
    """
    trained = elements.trainable / run.shards
    states: dict[str, float] = {}
    if run.optimizer_on_nvme:
        states["master weights"] = states["gradients"] = 4 * trained
        states["optimizer states"] = run.state_bytes * trained
    if run.param_on_nvme:
        states["weights"] = run.weight_bytes * elements.total / run.shards
    return states


def largest_sub_group(elements: Elements, run: Candidate) -> float:
    """Elements of the largest of the groups that ZeRO 3 updates at a time: the last parameter exceeds the limit."""
    return min(elements.trainable, SUB_GROUP * run.shards + elements.largest) / run.shards

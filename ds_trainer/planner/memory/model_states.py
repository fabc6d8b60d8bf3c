"""Model states of a rank between two steps: weights, gradients, float32 masters, optimizer states, buffers of ZeRO.

With ``n`` elements of the model on a rank (a slice with tensor parallelism), ``t`` of them trained, ``W`` ranks that
share them, ``w`` bytes of a weight and ``B`` elements of ``reduce_bucket_size``, DeepSpeed 0.19.8 holds, in bytes::

    stage 0       w n  +  (4 t masters, if w is 2)  +  8 t
    stages 1, 2   w n  +  4 t / W  +  8 t / W
    stage 3       w n / W  +  w t / W (gradients)  +  4 t / W  +  8 t / W  +  w B  +  w x persistent elements

    hpZ           w n / (ranks of hpZ), from the first forward pass to the optimizer step, beside the weights

    optimizer offloaded, in host memory in addition
    stages 1, 2   4 t / W (gradients)  +  w t / W (the updated weights)  +  w x largest parameter (also on the device)
    stage 3       4 t / W (gradients)

    optimizer on NVMe: on the disk, for each rank, 4 t / W (masters) + 8 t / W + 4 t / W (gradients); in host memory
    the gradients in the dtype of accumulation, and 4 buffers of 4 bytes x the largest sub-group

    weights on NVMe: on the disk w n / W; in host memory the first 10**9 elements of them, 5 buffers of w x the
    largest shard, and if there are more elements, one of W x w x the largest sub-group: its parameters as a whole

Source: allocations of DeepSpeed's engines, counted in ``benchmarks/plan_memory.py``; the constructors in
``runtime/zero/stage_1_and_2.py`` and ``stage3.py``; for NVMe ``runtime/swap_tensor/partitioned_optimizer_swapper.py``
(``swap_in_optimizer_state``), ``partitioned_param_swapper.py`` (``_configure_aio``,
``reserve_partitioned_swap_space``), ``stage3.py`` (``_create_param_groups_fp16_flat_cpu_memory``).
"""

from __future__ import annotations

from ds_trainer.planner.candidate import Candidate
from ds_trainer.planner.memory.elements import Elements
from ds_trainer.planner.offload_sizes import (
    OPTIMIZER_BUFFERS,
    PARAM_BUFFERS,
    PARAMS_IN_HOST,
    SUB_GROUP,
    param_buffer,
)


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
    found: dict[str, float] = {}
    if run.optimizer_on_nvme:
        found["master weights"] = found["gradients"] = 4 * trained
        found["optimizer states"] = run.state_bytes * trained
    if run.param_on_nvme:
        found["weights"] = run.weight_bytes * elements.total / run.shards
    return found


def largest_sub_group(elements: Elements, run: Candidate) -> float:
    """Elements of the largest of the groups that ZeRO 3 updates at a time: the last parameter exceeds the limit."""
    return min(elements.trainable, SUB_GROUP * run.shards + elements.largest) / run.shards

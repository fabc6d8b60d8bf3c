"""ZeRO 1 and 2 know which elements of each gradient this rank keeps; those of other ranks are told apart no further.

DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``: ``initialize_gradient_partitioning_data_structures``) compares each
parameter with the partition of each rank when the engine is created, twice, and stores where each of them begins. Each
reduction (``average_tensor``) then makes a slice of the bucket for each parameter and rank, adds them all up in one
all-reduce, and reads those of its own rank: work in proportion to the ranks, in each micro-batch at stage 2.

Here a parameter has at most three parts: before, in and after the partition of this rank. What comes before counts as
the partition of the rank before, what comes after as that of the rank after. The all-reduce is the same, and so are the
bits that are read. Left to DeepSpeed, which needs the ranks there: parameters larger than a bucket (their slices decide
in how many all-reduces they are added), ``use_multi_rank_bucket_allreduce: false``, Muon, ZenFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def own_gradient_partition() -> Iterator[None]:
    """Inside, engines of ZeRO 1 and 2 are created with these structures."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    theirs = DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures

    def initialize(optimizer: Any) -> None:
        trained = [parameter for group in optimizer.bit16_groups for parameter in group]
        muon = any(getattr(parameter, "use_muon", False) for parameter in trained)
        if muon or optimizer.zenflow or not optimizer.use_multi_rank_bucket_allreduce:
            theirs(optimizer)
            return
        for index in range(len(optimizer.round_robin_bit16_groups)):
            _initialize_group(optimizer, index)

    DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures = initialize
    try:
        yield
    finally:
        DeepSpeedZeroOptimizer.initialize_gradient_partitioning_data_structures = theirs


def _initialize_group(optimizer: Any, index: int) -> None:
    """The structures of one parameter group (``initialize_gradient_partition``, ``get_first_param_index``)."""
    from deepspeed import comm

    group = optimizer.real_dp_process_group[index]
    ranks, rank = comm.get_world_size(group=group), comm.get_rank(group=group)
    size = int(optimizer.partition_size[index])
    holders: dict[int, list[int]] = {}
    computed, inserted, starts = ({other: {} for other in range(ranks)} for _ in range(3))  # type: ignore[var-annotated]
    numbers = dict.fromkeys(range(ranks), 0)
    first: dict[int, int | None] = dict.fromkeys(range(ranks))
    optimizer.param_to_partition_ids[index], optimizer.total_grads_in_partition[index] = holders, numbers
    optimizer.is_grad_computed[index], optimizer.first_param_index_in_partition[index] = computed, first
    optimizer.grad_partition_insertion_offset[index], optimizer.grad_start_offset[index] = inserted, starts
    optimizer.is_partition_reduced[index] = dict.fromkeys(range(ranks), False)
    optimizer.remaining_grads_in_partition[index] = {}  # filled for each backward pass
    begin = 0
    parameters = zip(optimizer.round_robin_bit16_groups[index], optimizer.round_robin_bit16_padding[index], strict=True)
    for place, (parameter, padding) in enumerate(parameters):
        elements, number = parameter.numel(), optimizer.get_param_id(parameter)
        parts = _parts(begin, elements, size, ranks)
        if elements <= optimizer.reduce_bucket_size:
            parts = _own_part(parts, begin, size, rank)
        for holder, start in parts.items():
            holders.setdefault(number, []).append(holder)
            numbers[holder] += 1
            computed[holder][number] = False
            inserted[holder][number] = max(0, begin - size * holder)
            starts[holder][number] = start
            first[holder] = place if first[holder] is None else first[holder]
        begin += elements + padding


def _parts(begin: int, elements: int, size: int, ranks: int) -> dict[int, int]:
    """The first element of a parameter in each partition of ``size`` elements that holds a part of it.

    Args:
        begin: where the parameter begins among all elements.
        elements: how many it has.
        size: elements of a partition.
        ranks: number of partitions.
    """
    end = min(ranks, max(begin, begin + elements - 1) // size + 1)
    return {holder: max(0, size * holder - begin) for holder in range(begin // size, end)}


def _own_part(parts: dict[int, int], begin: int, size: int, rank: int) -> dict[int, int]:
    """The ``parts`` before, in and after the partition of ``rank``, each as one."""
    holders = {rank - 1: 0} if any(holder < rank for holder in parts) else {}
    if rank in parts:
        holders[rank] = parts[rank]
    if any(holder > rank for holder in parts):
        holders[rank + 1] = max(0, size * (rank + 1) - begin)
    return holders

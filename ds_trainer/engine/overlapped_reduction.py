"""Gradients of ZeRO 1 and 2 are reduced while the backward pass runs: a bucket is sent when it is full.

DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py``) waits for each bucket before the backward pass goes on; stage 1
even begins after it. Its ``overlap_comm`` reads gradients on another stream than the one that writes them, and leaves
parameters out that the last micro-batch does not use. Here the collective of a bucket is asynchronous: NCCL orders it
after what the current stream has written, and the bucket is used again after the stream has waited for it. What
DeepSpeed does with a reduced bucket is done then. Buckets are filled, sent and completed in the order of
:mod:`ds_trainer.engine.reduction_order`, the same on all ranks and in all runs, and each is summed by one collective,
in place. So the results are the same bits as without overlap, which waits for each bucket at once.

Left to DeepSpeed: offload of the optimizer, ``reduce_scatter: false``, ``contiguous_gradients: false``,
``use_multi_rank_bucket_allreduce: false``, Muon, ZenFlow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_BUFFERS = 2  # of a dtype: one is filled while the other one is sent


class _Sent(NamedTuple):
    """Gradients that are being summed over the ranks of one process group.

    Attributes:
        work: the handle of the collective.
        summed: all of them, flat, in the dtype of the communication.
        gradients: parts of the bucket where the sums belong.
    """

    work: Any
    summed: torch.Tensor
    gradients: Sequence[torch.Tensor]


class _Bucket(NamedTuple):
    """A bucket that is being reduced.

    Attributes:
        buffer: to be filled again; None for a gradient that is larger than a bucket.
        sent: one for each process group.
        entries: ``(group of parameters, index in it, id, index in sent, first element in it)`` of each parameter.
    """

    buffer: torch.Tensor | None
    sent: list[_Sent]
    entries: list[tuple[int, int, int, int, int]]


def can_overlap(optimizer: Any) -> bool:
    """Whether the buckets of ``optimizer``, DeepSpeed's for ZeRO 1 and 2, can be reduced here."""
    muon = any(getattr(parameter, "use_muon", False) for group in optimizer.bit16_groups for parameter in group)
    others = optimizer.cpu_offload or optimizer.zenflow or muon
    in_buffers = optimizer.contiguous_gradients and optimizer.reduce_scatter
    return bool(in_buffers and optimizer.use_multi_rank_bucket_allreduce and not others)


class OverlappedReduction:
    """Takes the place of ``reduce_ipg_grads`` of one optimizer.

    Args:
        optimizer: DeepSpeed's optimizer of ZeRO 1 or 2.
        overlaps: whether the backward pass goes on while a bucket is reduced.
    """

    def __init__(self, optimizer: Any, overlaps: bool) -> None:
        self._optimizer, self._overlaps = optimizer, overlaps
        self._pending: deque[tuple[Any, _Bucket]] = deque()
        optimizer.overlap_comm = False  # DeepSpeed's own
        optimizer.reduce_ipg_grads = self._reduce

    def drop(self) -> None:
        """Wait for what was sent by an interrupted pass, and forget it."""
        while self._pending:
            for sent in self._pending.popleft()[1].sent:
                sent.work.wait()

    def _reduce(self, comm_dtype: torch.dtype | None = None) -> None:
        """Send the full bucket of ``comm_dtype``; None: all that is left, at the end of the pass, and complete it."""
        buckets = self._optimizer.ipg_buckets
        for dtype in sorted(buckets, key=str) if comm_dtype is None else [comm_dtype]:
            if buckets[dtype].params:
                self._send(buckets[dtype], dtype, fills_again=comm_dtype is not None)
        while self._pending and (comm_dtype is None or not self._overlaps):
            self._complete()

    def _send(self, bucket: Any, dtype: torch.dtype, fills_again: bool) -> None:
        from deepspeed import comm

        optimizer = self._optimizer
        large = optimizer.extra_large_param_to_reduce.pop(dtype, None)
        buffer = bucket.buffer[bucket.index]
        gradients = buffer[: bucket.elements] if large is None else self._large(large)
        if optimizer.gradient_average:
            ranks = comm.get_world_size(group=optimizer.dp_process_group)
            gradients.div_(ranks / float(optimizer.sequence_parallel_size))
        parts: dict[Any, list[torch.Tensor]] = {}
        places: dict[Any, list[int]] = {}
        entries, begin = [], 0
        for index, place, number in bucket.params:
            parameter = optimizer.bit16_groups[index][place]
            optimizer.params_already_reduced[number] = True
            group = optimizer.real_dp_process_group[index]  # of experts, the ranks that have the same ones
            listed = parts.setdefault(group, [])
            at, first = places.setdefault(group, [len(places), 0])
            entries.append((index, place, number, at, first))
            places[group][1] += parameter.numel()
            listed.append(gradients[begin : begin + parameter.numel()])
            begin += parameter.numel()
        if len(parts) == 1:  # no copy
            parts = {group: [gradients] for group in parts}
        sent = []
        in_dtype = torch.float32 if optimizer.sequence_parallel_size > 1 else dtype
        for group, listed in parts.items():
            summed = (listed[0] if len(listed) == 1 else torch.cat(listed)).to(in_dtype)
            sent.append(_Sent(comm.all_reduce(summed, group=group, async_op=True), summed, listed))
        self._pending.append((bucket, _Bucket(buffer if large is None else None, sent, entries)))
        bucket.clear()
        if large is None and fills_again:
            bucket.buffer[bucket.index] = self._free_buffer(bucket, buffer)

    def _large(self, parameter: Any) -> torch.Tensor:
        gradient = self._optimizer.get_gradient_for_reduction(parameter)
        flat: torch.Tensor = gradient.view(-1)
        return flat

    def _free_buffer(self, bucket: Any, like: torch.Tensor) -> torch.Tensor:
        """A buffer that no collective uses, of the size of ``like``."""
        if not self._overlaps:
            return like
        while True:
            used = [one.buffer for owner, one in self._pending if owner is bucket and one.buffer is not None]
            if len(used) < _BUFFERS:
                return bucket.buffer.pop() if len(bucket.buffer) > 1 else torch.empty_like(like)
            self._complete()

    def _complete(self) -> None:
        """Wait for the oldest bucket, and keep what this rank has of it."""
        optimizer = self._optimizer
        owner, bucket = self._pending.popleft()
        for sent in bucket.sent:
            sent.work.wait()  # on a GPU the stream waits, not the host
            if sent.summed is not sent.gradients[0]:
                parts = sent.summed.split([part.numel() for part in sent.gradients])
                for gradient, part in zip(sent.gradients, parts, strict=True):
                    gradient.copy_(part)
        for index, place, number, at, first in bucket.entries:
            parameter = optimizer.bit16_groups[index][place]
            self._accumulate(index, number, parameter, bucket.sent[at].summed, first)
            if optimizer.is_param_in_current_partition[number]:
                optimizer.copy_grads_in_partition(parameter, index)
            elif optimizer.partition_gradients:
                optimizer.clear_grad_attribute(parameter)
        if bucket.buffer is not None and self._overlaps:
            owner.buffer.append(bucket.buffer)

    def _accumulate(self, index: int, number: int, parameter: Any, summed: torch.Tensor, first: int) -> None:
        """Add the part of this rank in the dtype of the communication, where DeepSpeed accumulates in float32."""
        optimizer = self._optimizer
        if not optimizer._use_compact_grad_partition_buffer(index):
            return
        from deepspeed import comm

        rank = comm.get_rank(group=optimizer.real_dp_process_group[index])
        start = optimizer.grad_start_offset[index][rank].get(number)
        if start is None:
            return
        inserted = optimizer.grad_partition_insertion_offset[index][rank][number]
        elements = int(min(parameter.numel() - start, optimizer.partition_size[index] - inserted))
        if elements > 0:
            own = optimizer._get_compact_grad_partition_slice(index, rank, number, elements)
            optimizer._add_to_grad_partition_buffer(own, summed[first + start : first + start + elements])

"""ZeRO-3's coalesced gathers and reductions without Python for each rank.

DeepSpeed 0.19.8 makes a slice for each parameter and rank, of each bucket of each micro-batch: to pack gradients
(``runtime/comm/coalesced_collectives.py``: ``reduce_scatter_coalesced``) and to unpack weights
(``runtime/zero/partition_parameters.py``: ``AllGatherCoalescedHandle.wait``). The device waits for that at hundreds of
ranks. Here a bucket is a matrix with one row per rank, and packing and unpacking are one operation of torch each, those
of its own FSDP. The collectives, their buffers and all results are DeepSpeed's, bit for bit.

Covered: any dtypes, autocast, hpZ, quantized weights, several groups of ranks; and the reductions that quantized
gradients leave to a plain reduce-scatter. Left to DeepSpeed, since nothing in it grows with the ranks: single
parameters, ``stage3_allgather_sequential``, ``stage3_use_all_reduce_for_fetch_params``, ``reduce_scatter: false``, the
all-to-all of quantized gradients, weights on NVMe that are not read yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch

from ds_trainer.utils import distributed
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_left_to_deepspeed = False


def vectorize_collectives(engine: Any) -> VectorizedCollectives | None:
    """Makes a DeepSpeed ``engine`` with ZeRO-3, for training or evaluation, gather and reduce this way.

    Returns the owner of the change; None if :func:`leave_to_deepspeed` was called.
    """
    return None if _left_to_deepspeed else VectorizedCollectives(engine)


def leave_to_deepspeed(leave: bool = True) -> None:
    """Later engines of this process use DeepSpeed's own collectives and hooks; with False ours again."""
    global _left_to_deepspeed
    _left_to_deepspeed = leave


def is_left_to_deepspeed() -> bool:
    """Whether :func:`leave_to_deepspeed` was called."""
    return _left_to_deepspeed


class VectorizedCollectives:
    """The collectives of one engine, until :meth:`close`."""

    def __init__(self, engine: Any) -> None:
        zero: Any = engine._config.zero_config
        self._coalesces = not zero.allgather_sequential and not zero.use_all_reduce_for_fetch_params
        parameters: Any = [p for p in engine.module.parameters() if hasattr(p, "all_gather_coalesced")]
        self._theirs = {p: p.all_gather_coalesced for p in parameters}
        self._releases = {p: (p.partition, partial(_release, p, p.partition)) for p in parameters}
        for parameter in parameters:
            parameter.all_gather_coalesced = self.gather
            parameter.partition = self._releases[parameter][1]
        self._optimizer = engine.optimizer if hasattr(engine.optimizer, _SCATTER) else None
        if self._optimizer is not None:
            scatter = getattr(self._optimizer, _SCATTER)

            def vectorized(*args: Any) -> list[torch.Tensor]:
                with _reduces_in_rows():
                    return scatter(*args)

            setattr(self._optimizer, _SCATTER, vectorized)

    def close(self) -> None:
        """Gives parameters and optimizer DeepSpeed's methods again."""
        for parameter, theirs in self._theirs.items():
            if vars(parameter).get("all_gather_coalesced") == self.gather:
                parameter.all_gather_coalesced = theirs
        for parameter, (theirs, ours) in self._releases.items():
            if vars(parameter).get("partition") is ours:
                parameter.partition = theirs
        self._theirs, self._releases = {}, {}
        if self._optimizer is not None:
            vars(self._optimizer).pop(_SCATTER, None)

    def gather(self, params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Any:
        """Begins to gather the weights of ``params``; the handle's ``wait`` makes them available. Collective.

        Takes the place of ``all_gather_coalesced`` of a parameter (``Init._convert_to_deepspeed_param``).
        """
        from deepspeed.runtime.zero import partition_parameters as library

        params = list(params)
        groups: dict[int, list[Any]] = {}
        for parameter in params:
            groups.setdefault(id(parameter.ds_process_group), []).append(parameter)
        if len(groups) > 1:
            return library.MultipleAllGatherHandles([self.gather(g, safe_mode, quantize) for g in groups.values()])
        if safe_mode or quantize or not self._coalesces or not _is_plain(params):
            return _in_rows(self._theirs[params[0]](params, safe_mode=safe_mode, quantize=quantize))
        for parameter in params:
            if parameter.ds_status != library.ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(parameter.ds_summary())
            parameter.ds_status = library.ZeroParamStatus.INFLIGHT
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for parameter in sorted(params, key=lambda parameter: parameter.ds_id):
            dtype = library.get_allgather_dtype(parameter, parameter.ds_tensor)
            by_dtype.setdefault(dtype, []).append(parameter)
        handles = [_gather(by_dtype[dtype], dtype) for dtype in library.sort_dtypes(by_dtype)]
        return library.MultipleAllGatherHandles(handles)


def _is_plain(params: list[Any]) -> bool:
    """Whether ``params``, which are sharded over the same ranks, are gathered in one bucket per dtype."""
    from deepspeed import comm
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    if len(params) < 2 or comm.get_world_size(group=params[0].ds_process_group) == 1:
        return False
    return all(parameter.ds_tensor.status == PartitionedParamStatus.AVAILABLE for parameter in params)


def _release(parameter: Any, theirs: Any, param_list: Any = None, *rest: Any, **named: Any) -> None:
    """Frees the gathered weights of ``parameter``; for anything else calls ``theirs``.

    Takes the place of ``partition`` of a parameter (``Init._convert_to_deepspeed_param``), which formats messages that
    are never printed, and then does this (``Init._partition_param``).
    """
    from deepspeed.runtime.zero import partition_parameters as library

    shard = parameter.ds_tensor
    if (
        param_list is None
        and not rest
        and named in ({}, {"free_data": True})
        and parameter.ds_status == library.ZeroParamStatus.AVAILABLE
        and shard is not None
        and shard.final_location is None  # not on NVMe
        and parameter.ds_zero_param_process_group is None  # no secondary shard
    ):
        library.free_param(parameter)
    else:
        theirs(param_list, *rest, **named)


# -- gathers ----------------------------------------------------------------------------------------------------------


def _gather(params: list[Any], dtype: torch.dtype) -> RowsHandle:
    """Begins to gather one bucket (``_all_gather_dtype`` in DeepSpeed)."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters as library

    first = params[0]
    secondary = first.ds_secondary_tensor is not None
    group = first.ds_process_group
    if secondary and first.ds_zero_param_process_group:
        group = first.ds_zero_param_process_group
    ranks = comm.get_world_size(group=group)
    device = get_accelerator().current_device_name()
    flat = torch.empty(ranks * sum(_shard_sizes(params, secondary)), dtype=dtype, device=device)
    own = flat.view(ranks, -1)[comm.get_rank(group=group)]
    shards = [parameter.ds_secondary_tensor if secondary else parameter.ds_tensor for parameter in params]
    torch.cat([shard.to(device=device, dtype=dtype) for shard in shards], out=own)
    return RowsHandle(library._dist_allgather_fn(own, flat, group), params, ranks, secondary, flat)


def _shard_sizes(params: list[Any], secondary: bool) -> list[int]:
    """Elements of each parameter on a rank, with padding; a secondary shard of hpZ is that of all its groups."""
    groups = [parameter.ds_secondary_tensor_num_of_groups if secondary else 1 for parameter in params]
    return [parameter.ds_tensor.ds_numel * number for parameter, number in zip(params, groups, strict=True)]


def _in_rows(handle: Any) -> Any:
    """DeepSpeed's ``handle`` with ours in place of each that makes slices for each rank."""
    from deepspeed.runtime.zero import partition_parameters as library

    if type(handle) is library.MultipleAllGatherHandles:
        handle.handles = [_in_rows(one) for one in handle.handles]
    if type(handle) is not library.AllGatherCoalescedHandle:
        return handle
    flat = None
    if handle.partitions is not None:  # consecutive parts of one tensor
        first = handle.partitions[0]
        flat = first.as_strided((handle.world_size * first.numel(),), (1,), first.storage_offset())
    work, secondary = handle.allgather_handle, handle.use_secondary_tensor
    return RowsHandle(work, handle.params, handle.world_size, secondary, flat, handle.quantization)


class RowsHandle:
    """A bucket that is being gathered. Takes the place of DeepSpeed's ``AllGatherCoalescedHandle``.

    Args:
        work: the collective.
        params: what the bucket contains, in order.
        ranks: number of ranks, whose shards follow each other in the bucket.
        secondary: the shards are those of hpZ.
        flat: the bucket; None if it is quantized.
        quantization: DeepSpeed's record of the quantized bucket.
    """

    def __init__(
        self,
        work: Any,
        params: list[Any],
        ranks: int,
        secondary: bool,
        flat: torch.Tensor | None,
        quantization: Any = None,
    ) -> None:
        self._work = work
        self._params = params
        self._ranks = ranks
        self._secondary = secondary
        self._flat = flat
        self._quantization = quantization
        self._complete = False

    @torch.no_grad()
    def wait(self, handle_dependency: bool = True) -> None:
        """Makes the weights available once the collective is done, without waiting for the device."""
        if self._complete:
            return
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero import partition_parameters as library

        self._work.wait()
        if self._quantization is not None:
            quantization = self._quantization
            quantization.quant_handle.wait()
            whole = quantization.backend.dequantize(quantization.quantized_param, quantization.scale_buffer)
            self._flat = whole.to(self._params[0].device)
        sizes = _shard_sizes(self._params, self._secondary)
        flat = self._flat[: self._ranks * sum(sizes)]  # type: ignore[index]
        weights = [flat.new_empty((self._ranks, size)) for size in sizes if size]
        if weights:
            rows = flat.view(self._ranks, -1)
            torch.split_with_sizes_copy(rows, [size for size in sizes if size], dim=1, out=weights)
        filled = iter(weights)
        for parameter, size in zip(self._params, sizes, strict=True):
            weight = next(filled).view(-1) if size else flat[:0]
            assert parameter.ds_status == library.ZeroParamStatus.INFLIGHT, parameter.ds_summary()
            if weight.numel() != parameter.ds_numel:
                weight = weight[: parameter.ds_numel]
            parameter.data = weight.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
            parameter.ds_status = library.ZeroParamStatus.AVAILABLE
        if not get_accelerator().is_synchronized_device():
            if handle_dependency:
                flat.record_stream(get_accelerator().current_stream())
            else:
                library.AllGatherCoalescedHandle.data_buffer.append([flat])
        self._complete = True
        self._flat = self._quantization = None


# -- reductions -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def reduce_scatter_in_rows(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """The mean over the ranks of ``group`` of this rank's part of each of ``tensors``, flat. Collective.

    Takes the place of DeepSpeed's ``reduce_scatter_coalesced``. A single tensor that the ranks divide is reduced in
    place. The parts are views of one buffer.
    """
    from deepspeed import comm
    from deepspeed.runtime.comm import coalesced_collectives as library

    rank, ranks = comm.get_rank(group), comm.get_world_size(group)
    flat = [tensor.reshape(-1) for tensor in tensors]
    sizes = [-(-tensor.numel() // ranks) for tensor in flat]
    buffer = flat[0] if len(flat) == 1 and flat[0].numel() == ranks * sizes[0] else _pack(flat, ranks)
    buffer.div_(ranks)
    own = buffer.view(ranks, -1)[rank]
    library._torch_reduce_scatter_fn(buffer.view(-1), own, group=group)
    # The last ranks have less of a tensor that the ranks do not divide.
    lengths = [max(0, min(size, tensor.numel() - rank * size)) for tensor, size in zip(flat, sizes, strict=True)]
    return [part[:length] for part, length in zip(own.split(sizes), lengths, strict=True)]


def _pack(tensors: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """A matrix whose row r has the parts of rank r of all ``tensors``, padded to the size of the first rank's."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        dtype = reduce(torch.promote_types, dtypes)
        tensors = [tensor.to(dtype) for tensor in tensors]
    filled = [tensor for tensor in tensors if tensor.numel()]
    return torch._chunk_cat(filled, 0, ranks) if filled else tensors[0].new_empty((ranks, 0))


@contextmanager
def _reduces_in_rows() -> Iterator[None]:
    """Inside, DeepSpeed reduces this way."""
    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.zero import stage3

    owners: Any = (coalesced_collectives, stage3)
    theirs = [owner.reduce_scatter_coalesced for owner in owners]
    for owner in owners:
        owner.reduce_scatter_coalesced = reduce_scatter_in_rows
    try:
        yield
    finally:
        for owner, function in zip(owners, theirs, strict=True):
            owner.reduce_scatter_coalesced = function


# -- compared with DeepSpeed's own ------------------------------------------------------------------------------------


def same_as_deepspeed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether gathers and reductions have DeepSpeed's results, bit for bit, on all ranks. Collective.

    If not, later engines of this process use DeepSpeed's own.
    """
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle

    ranks = distributed.world_size()
    generator = torch.Generator().manual_seed(distributed.rank())
    shapes = [(ranks, 3), (2 * ranks + 1,), (1,), (max(1, ranks - 1), 5)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for chosen in (tensors, tensors[:1]):
        copies = [[tensor.clone() for tensor in chosen] for _ in range(2)]
        pairs += zip(reduce_scatter_in_rows(copies[0]), reduce_scatter_coalesced(copies[1]), strict=True)
    flat = _pack([tensor.view(-1) for tensor in tensors], ranks).view(-1)
    done = SimpleNamespace(wait=lambda: None)
    weights = [_InFlight(tensor, ranks) for tensor in tensors], [_InFlight(tensor, ranks) for tensor in tensors]
    RowsHandle(done, weights[0], ranks, False, flat).wait()
    AllGatherCoalescedHandle(done, weights[1], flat.chunk(ranks), ranks).wait()
    pairs += [(one.data, other.data) for one, other in zip(*weights, strict=True)]
    if distributed.agree(torch.tensor([int(not all(torch.equal(*pair) for pair in pairs))]))[0]:
        leave_to_deepspeed()
        return False
    return True


class _InFlight(SimpleNamespace):
    """What a handle needs of a parameter that is being gathered."""

    def __init__(self, whole: torch.Tensor, ranks: int) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        shard = SimpleNamespace(ds_numel=-(-whole.numel() // ranks), dtype=whole.dtype)
        super().__init__(ds_numel=whole.numel(), ds_shape=whole.shape, ds_tensor=shard, data=None)
        self.ds_status = ZeroParamStatus.INFLIGHT

"""Fixes for DeepSpeed's tensor-parallel layers.

DeepSpeed 0.19.8 (``module_inject/layers.py``) sums over the tensor-parallel ranks with ``all_reduce(x.contiguous())``
and continues with ``x``: if ``x`` is not contiguous, the sum is written to a copy and discarded. The gradient of a
matrix product with respect to a transposed input has that input's memory layout, so this happens silently in a
column-parallel layer whose input is ``x.t()``, or the transposed output of a convolution for one sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.engine.tensor_parallel.slices import is_sliced


def repair_layers() -> None:
    """Replaces DeepSpeed's reductions with ones that keep the sum. Idempotent."""
    from deepspeed.module_inject import layers

    layers.RowParallel.forward = staticmethod(_row_forward)
    layers.ColumnParallel.backward = staticmethod(_column_backward)
    layers.AsyncColumnParallel.backward = staticmethod(_overlapped_column_backward)


def _row_forward(ctx: Any, group: Any, partial: torch.Tensor, is_inference_mode: bool) -> torch.Tensor:
    ctx.group = group
    if group is None or group.size() == 1:
        return partial
    # Autograd does not save the product, so the sum can reuse its memory.
    total = partial.contiguous()
    torch.distributed.all_reduce(total, group=group)
    return total


def _column_backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
    if ctx.group is None or ctx.group.size() == 1:
        return None, gradient
    total = gradient.contiguous()
    torch.distributed.all_reduce(total, group=ctx.group)
    return None, total


def _overlapped_column_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """For ``y = x W^T + b``: overlaps the reduction of the input's gradient with computing those of weight and bias."""
    inputs, weight = ctx.saved_tensors
    of_inputs = gradient.matmul(weight).contiguous()
    handle = torch.distributed.all_reduce(of_inputs, group=ctx.group, async_op=True)
    rows = gradient.reshape(-1, gradient.shape[-1])
    of_weight = rows.t().matmul(inputs.reshape(-1, inputs.shape[-1]))
    of_bias = rows.sum(0) if ctx.use_bias else None
    handle.wait()
    return None, of_inputs, of_weight, of_bias


def allow_empty_slices(engine: Any) -> None:
    """Makes ZeRO-3 accept empty slices: layers with fewer key-value heads than tensor-parallel ranks.

    DeepSpeed 0.19.8 (``partitioned_param_coordinator.py:366``) fetches nothing for a layer whose parameters have no
    elements, and then asserts that they were fetched. This marks them as available.
    """
    if not any(getattr(parameter, "ds_numel", None) == 0 for parameter in engine.module.parameters()):
        return
    coordinator = getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
    original = coordinator.fetch_sub_module

    def fetch(layer: nn.Module, forward: bool) -> None:
        for parameter in layer.parameters(recurse=False):
            materialize_if_empty(parameter)
        original(layer, forward=forward)

    coordinator.fetch_sub_module = fetch


def materialize_if_empty(parameter: Any) -> bool:
    """Whether a ZeRO-3 parameter has no elements. Marks it as available, because DeepSpeed would fail to gather it."""
    if getattr(parameter, "ds_numel", None) != 0:
        return False
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE:
        parameter.data = parameter.new_empty(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    return True


def skip_input_check(engine: Any) -> None:
    """Skips DeepSpeed's comparison of the first inputs over the tensor-parallel ranks.

    DeepSpeed 0.19.8 fails on nested tensors, such as the outputs of an encoder or a dictionary of features
    (``runtime/utils.py:1245``). Our ranks receive their batches from one of them anyway.
    """
    check = getattr(engine, "first_dataloader_check", None)
    if check is not None:
        check.remove()


class SlicedEmbedding:
    """Gathers an embedding that DeepSpeed has partitioned along its width, with the interface of DeepSpeed's layers.

    Without a plan DeepSpeed partitions embeddings inside layers (T5's relative positions, one column per head), but
    does not mark them: their gradients would be treated as replicated, and one rank's slice would be saved.
    """

    def __init__(self, module: nn.Embedding, group: Any, sizes: list[int]) -> None:
        self.weight, self.bias = module.weight, None
        self._group, self._sizes = group, sizes

    @torch.no_grad()
    def gather_params(self, parameters: list[nn.Parameter | None]) -> None:
        """Replaces the slice with the full tensor."""
        weight = self.weight
        local = weight.data
        padded = local.new_zeros(local.shape[0], max(self._sizes))
        padded[:, : local.shape[1]] = local
        slices = [torch.empty_like(padded) for _ in self._sizes]
        torch.distributed.all_gather(slices, padded, group=self._group)
        weight.data = torch.cat([s[:, :size] for s, size in zip(slices, self._sizes, strict=True)], dim=1)


def mark_sliced_embeddings(model: nn.Module, group: Any) -> None:
    """Marks partitioned embeddings, so that they are reduced and gathered like other slices."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            continue
        weight: Any = module.weight
        meta = getattr(weight, DS_AUTOTP_UC_META, None)
        if meta is not None and not is_sliced(weight):
            weight.tensor_model_parallel = True
            weight.gather_params = SlicedEmbedding(module, group, list(meta["partition_sizes"])).gather_params

"""Repairs of DeepSpeed's tensor-parallel layers, needed for exact numbers.

DeepSpeed 0.19.8 (``module_inject/layers.py``) sums over the tensor-parallel ranks by ``all_reduce(x.contiguous())``
and goes on with ``x``: where ``x`` is not contiguous the sum goes into a copy that is thrown away. The gradient of a
matrix product with respect to a transposed input is laid out like that input, so this happens, without a word, to a
column-parallel layer that is fed with ``x.t()``, or with the transposed output of a convolution for one sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_trainer.engine.tensor.slices import is_sliced


def repair_layers() -> None:
    """Put sums that reach the tensor in the place of DeepSpeed's. May be called again."""
    from deepspeed.module_inject import layers

    layers.RowParallel.forward = staticmethod(_row_forward)
    layers.ColumnParallel.backward = staticmethod(_column_backward)
    layers.AsyncColumnParallel.backward = staticmethod(_overlapped_column_backward)


def _row_forward(ctx: Any, group: Any, partial: torch.Tensor, is_inference_mode: bool) -> torch.Tensor:
    ctx.group = group
    if group is None or group.size() == 1:
        return partial
    # The product is this layer's own and nobody saves it, so its memory is used for the sum.
    whole = partial.contiguous()
    torch.distributed.all_reduce(whole, group=group)
    return whole


def _column_backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
    if ctx.group is None or ctx.group.size() == 1:
        return None, gradient
    whole = gradient.contiguous()
    torch.distributed.all_reduce(whole, group=ctx.group)
    return None, whole


def _overlapped_column_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Of ``y = x W^T + b``: the sum of the input's gradient travels while those of weight and bias are computed."""
    inputs, weight = ctx.saved_tensors
    of_inputs = gradient.matmul(weight).contiguous()
    handle = torch.distributed.all_reduce(of_inputs, group=ctx.group, async_op=True)
    rows = gradient.reshape(-1, gradient.shape[-1])
    of_weight = rows.t().matmul(inputs.reshape(-1, inputs.shape[-1]))
    of_bias = rows.sum(0) if ctx.use_bias else None
    handle.wait()
    return None, of_inputs, of_weight, of_bias


def keep_empty_slices(engine: Any) -> None:
    """Let ZeRO-3 accept slices without elements: of a layer with fewer key-value heads than tensor-parallel ranks.

    DeepSpeed 0.19.8 (``partitioned_param_coordinator.py:366``) fetches nothing for a layer whose parameters have no
    elements, and then insists that they were fetched. There is nothing to fetch: they are declared present.
    """
    if not any(getattr(parameter, "ds_numel", None) == 0 for parameter in engine.module.parameters()):
        return
    coordinator = getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
    original = coordinator.fetch_sub_module

    def fetch(layer: nn.Module, forward: bool) -> None:
        for parameter in layer.parameters(recurse=False):
            present_if_empty(parameter)
        original(layer, forward=forward)

    coordinator.fetch_sub_module = fetch


def present_if_empty(parameter: Any) -> bool:
    """Whether a parameter that ZeRO-3 shards has no elements; it is whole then. DeepSpeed would fail to gather it."""
    if getattr(parameter, "ds_numel", None) != 0:
        return False
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE:
        parameter.data = parameter.new_empty(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    return True


def admit_generation(engine: Any) -> None:
    """Let the first forward pass be one of ``generate``.

    DeepSpeed 0.19.8 compares the inputs of the first pass over the tensor-parallel ranks, and fails on those that hold
    tensors inside (``runtime/utils.py:1245``): the encoder's outputs. Our ranks get their batches from one of them.
    """
    check = getattr(engine, "first_dataloader_check", None)
    if check is not None:
        check.remove()


class SlicedEmbedding:
    """Owner of an embedding that DeepSpeed has cut along its width, in the manner of its other layers.

    Without a plan DeepSpeed cuts embeddings inside of layers (T5's relative positions, a column for each head), but
    does not mark them as cut: their gradients would be counted once instead of summed, and one rank's slice be saved.
    """

    def __init__(self, module: nn.Embedding, group: Any, sizes: list[int]) -> None:
        self.weight, self.bias = module.weight, None
        self._group, self._sizes = group, sizes

    @torch.no_grad()
    def gather_params(self, parameters: list[nn.Parameter | None]) -> None:
        """Put the whole tensor in the place of the slice."""
        weight = self.weight
        own = weight.data
        padded = own.new_zeros(own.shape[0], max(self._sizes))
        padded[:, : own.shape[1]] = own
        pieces = [torch.empty_like(padded) for _ in self._sizes]
        torch.distributed.all_gather(pieces, padded, group=self._group)
        weight.data = torch.cat([p[:, :size] for p, size in zip(pieces, self._sizes, strict=True)], dim=1)


def mark_sliced_embeddings(model: nn.Module, group: Any) -> None:
    """Mark embeddings that were cut, so that they are counted and gathered like other slices."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            continue
        weight: Any = module.weight
        meta = getattr(weight, DS_AUTOTP_UC_META, None)
        if meta is not None and not is_sliced(weight):
            weight.tensor_model_parallel = True
            weight.gather_params = SlicedEmbedding(module, group, list(meta["partition_sizes"])).gather_params

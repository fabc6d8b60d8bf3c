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
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError


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


# Verifies in the first step that replicated weights have the same gradient on all tensor-parallel ranks.
#
# A replicated weight that is applied to partitioned activations (the norm of a head, in a custom plan) gets only part
# of its gradient on each rank. Training would continue: the ranks' copies would drift apart, and one of them would be
# saved.


_TOLERANCE = 0.01  # relative to a gradient's norm; a different summation order changes far less, also in bf16
_NEGLIGIBLE = 1e-5  # relative to the largest norm: smaller gradients may be rounding errors


class GradientAgreement:
    """Compares the gradients of the first step across ranks, then removes its hooks.

    Args:
        model: the model that DeepSpeed has partitioned.
        groups: the process groups; the ranks of ``tp`` must agree.
    """

    def __init__(self, model: nn.Module, groups: ParallelGroups) -> None:
        self._group = groups.tp
        replicated = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not is_sliced(p)]
        self._names = [name for name, _ in replicated]
        self._norms: list[torch.Tensor | None] = [None] * len(replicated)
        self._hooks = [p.register_hook(self._recorder(index)) for index, (_, p) in enumerate(replicated)]

    def _recorder(self, index: int) -> Any:
        def record(gradient: torch.Tensor) -> None:
            norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
            previous = self._norms[index]
            self._norms[index] = norm if previous is None else previous + norm

        return record

    def check(self, device: torch.device) -> bool:
        """Compares the recorded norms. Collective.

        Returns:
            True if the comparison is complete; False if gradients were not finite.

        Raises:
            ConfigError: the gradients differ across ranks.
        """
        recorded = [torch.zeros(()) if norm is None else norm for norm in self._norms]
        norms = torch.stack([norm.to(device) for norm in recorded]) if recorded else torch.zeros(0, device=device)
        largest, smallest = norms.clone(), norms.clone()
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=self._group)
        torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN, group=self._group)
        self._norms = [None] * len(self._norms)
        if not bool(torch.isfinite(largest).all() and torch.isfinite(smallest).all()):
            return False
        for hook in self._hooks:
            hook.remove()
        if not recorded:
            return True
        difference = largest - smallest
        wrong = (difference > _TOLERANCE * largest) & (difference > _NEGLIGIBLE * largest.max())
        names = [name for name, bad in zip(self._names, wrong.tolist(), strict=True) if bad]
        if names:
            raise ConfigError(
                f"{', '.join(names[:4])}{' and others' if names[4:] else ''} are replicated on the tensor-parallel "
                "ranks, but their gradients differ: a replicated layer is applied to partitioned activations. In "
                'tensor_parallel.partition_config give it partition_type "skip" with "grad_allreduce": true to add up '
                "its gradients, or do not partition the layers around it."
            )
        return True

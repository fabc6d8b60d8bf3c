"""The step of stage 0 in 16 bits, as operations over all tensors together.

DeepSpeed 0.19.8 (``FP16_UnfusedOptimizer.step``) reads, converts, scales and copies one tensor after the other, waits
for the device twice in each parameter group, and counts in the norm neither divided experts nor the weights that
tensor-parallel ranks other than the first hold. Here each of these is one foreach operation, and the host waits once.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_trainer.engine.tensor_parallel.slices import gradient_norm
from ds_trainer.parallel.groups import ParallelGroups
from ds_trainer.utils.errors import ConfigError


def step_all_at_once(optimizer: Any, groups: ParallelGroups) -> None:
    """Makes ``optimizer``, DeepSpeed's wrapper, step this way if it is that of stage 0 in 16 bits.

    Raises:
        ConfigError: weights are divided, and it is a wrapper that leaves those of other ranks out of the norm.
    """
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if type(optimizer) is FP16_UnfusedOptimizer and not optimizer.fused_lamb_legacy:
        optimizer.step = _WholeStep(optimizer, groups)
    elif isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)) and groups.layout.tp * groups.layout.ep > 1:
        raise ConfigError(
            f"{type(optimizer.optimizer).__name__} in 16 bits with zero_stage=0 leaves weights that other ranks hold "
            "out of the gradient norm. Set zero_stage to 1 or more, or use an optimizer of torch."
        )


class _WholeStep:
    """Takes the place of ``FP16_UnfusedOptimizer.step``."""

    def __init__(self, optimizer: Any, groups: ParallelGroups) -> None:
        self._optimizer, self._groups = optimizer, groups
        self._weights = [weight for group in optimizer.fp16_groups for weight in group]
        self._masters = [master for group in optimizer.fp32_groups for master in group]

    @torch.no_grad()
    def __call__(self, closure: Any = None) -> bool:
        """Updates masters and weights, unless the gradient is not finite; returns whether it is not. Collective."""
        from deepspeed.runtime.fp16 import unfused_optimizer

        optimizer = self._optimizer
        optimizer.overflow = optimizer.overflow_checker.check()
        if optimizer.overflow:
            return bool(optimizer._skip_invalid_grad_norm())
        norm = float(gradient_norm(self._weights, self._groups))
        if unfused_optimizer.is_invalid_grad_norm(norm):
            return bool(optimizer._skip_invalid_grad_norm())
        optimizer._global_grad_norm = norm
        optimizer._update_scale(False)
        scale = optimizer.unscale_and_clip_grads(norm, apply_scale=False)
        self._give_gradients(1.0 / scale)
        optimizer.optimizer.step()
        for master in self._masters:
            master.grad = None
        torch._foreach_copy_(self._weights, [master.detach() for master in self._masters])
        return False

    def _give_gradients(self, factor: float) -> None:
        """Gives the masters the gradients of the weights times ``factor``; zeros where a weight has none."""
        converted: tuple[list[Any], list[Any]] = ([], [])
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is None:
                master.grad = torch.zeros_like(master)
            elif weight.grad.dtype == master.dtype:
                master.grad = weight.grad
            else:
                master.grad = torch.empty_like(master)
                converted[0].append(master.grad)
                converted[1].append(weight.grad)
        if converted[0]:
            torch._foreach_copy_(*converted)
        if factor != 1.0:
            torch._foreach_mul_([master.grad for master in self._masters], factor)

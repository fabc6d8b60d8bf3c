"""Updates that must not happen: noticed before the optimizer uses a gradient, and left out on all ranks alike.

**What notices.** Every ZeRO stage computes the norm of the global gradient before the optimizer runs, and DeepSpeed
leaves a step out whose norm is not finite. The norm is the same on all ranks, so they decide alike without another
word. Two holes are closed here: bf16 with ``check_grad_overflow: false`` and ``compute_grad_norm: false``, where
DeepSpeed 0.19.8 would go on. float32 without ZeRO, where it looks at nothing, is
:class:`~ds_trainer.engine.training_engine.TrainingEngine`'s own part. A loss that is not finite makes such a gradient
(:func:`factor_of`), also where the backward pass alone would not have.

**How a step is left out** that DeepSpeed itself finds nothing wrong with (:func:`left_out`): its optimizer is sent the
way that it takes after an overflow, which clears gradients and touches neither weights nor states. The loss scale,
which did nothing wrong, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def factor_of(loss: torch.Tensor, ranks: int) -> torch.Tensor:
    """``ranks``, or NaN where ``loss`` is not finite: a scalar of its type, without asking the device.

    Times that factor, a loss that is not finite has a gradient that is not finite either: a clamp, a mask or a kernel
    with a backward pass of its own may have made a finite one of it.
    """
    return loss.detach() * 0.0 + ranks


def complete_checks(optimizer: Any) -> None:
    """Let ZeRO 1 and 2 look at what they would let pass.

    ``check_grad_overflow`` in bf16 is one more pass over all gradients, one more all-reduce and one more wait for the
    device, although the norm says the same. Where there is a norm, it alone is looked at.

    Args:
        optimizer: as DeepSpeed wraps it.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    if not optimizer.compute_grad_norm:
        optimizer.check_grad_overflow = True
    elif optimizer.dtype == torch.bfloat16:
        optimizer.check_grad_overflow = True
        # With offload DeepSpeed keeps a flag while it copies, which costs nothing.
        if type(optimizer) is DeepSpeedZeroOptimizer and not optimizer.cpu_offload:
            optimizer.check_overflow = lambda partition_gradients=True: None


def scales_loss(engine: Any) -> bool:
    """Whether DeepSpeed's ``engine`` scales the loss, so that a gradient may overflow without anybody's fault."""
    return bool(engine.fp16_enabled())


@contextmanager
def left_out(optimizer: Any) -> Iterator[None]:
    """Inside, a step of ``optimizer``, as DeepSpeed wraps it, clears the gradients and updates nothing."""
    missing = object()
    replaced = _detour(optimizer)
    before = {name: vars(optimizer).get(name, missing) for name in replaced}
    vars(optimizer).update(replaced)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                del vars(optimizer)[name]
            else:
                vars(optimizer)[name] = value


def _detour(optimizer: Any) -> dict[str, Any]:
    """What to put in the place of which attributes of ``optimizer``."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    scale_stays: dict[str, Callable[..., Any]] = {"_update_scale": lambda *args, **kwargs: None}
    if isinstance(optimizer, DeepSpeedZeroOptimizer):

        def overflows(partition_gradients: bool = True) -> None:
            optimizer.overflow = True

        def norm() -> torch.Tensor:  # ZenFlow looks at nothing else
            return torch.full((), float("inf"))

        return {
            "check_grad_overflow": True,
            "check_overflow": overflows,
            "scaled_global_norm": norm,
            **scale_stays,
        }
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):

        def overflowed(update_scale: bool = True) -> bool:
            optimizer.overflow = True
            return bool(optimizer._loss_scale_update_and_overflow_cleanup()) if update_scale else True

        return {"_overflow_check_and_loss_scale_update": overflowed, **scale_stays}
    if isinstance(optimizer, BF16_Optimizer):

        def cleared(closure: Any = None) -> None:
            optimizer.overflow = True
            optimizer._global_grad_norm = float("inf")
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()

        return {"step": cleared}
    if hasattr(optimizer, "_skip_invalid_grad_norm"):  # what wraps 16 bits without ZeRO

        def skipped(closure: Any = None) -> Any:
            return optimizer._skip_invalid_grad_norm()

        return {"step": skipped, **scale_stays}
    return {"step": lambda closure=None: None, "overflow": True}

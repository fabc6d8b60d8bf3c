"""Skips updates with non-finite gradients, on all ranks together and before the optimizer uses the gradient.

**Detection.** Every ZeRO stage computes the norm of the global gradient before the optimizer runs, and DeepSpeed skips
a step whose norm is not finite. The norm is the same on all ranks, so they make the same decision without further
communication. Two gaps are closed here: bf16 with ``check_grad_overflow: false`` and ``compute_grad_norm: false``,
where DeepSpeed 0.19.8 would update the weights. :class:`~ds_trainer.engine.training_engine.TrainingEngine` covers
float32 without ZeRO, where DeepSpeed checks nothing. A non-finite loss causes a non-finite gradient
(:func:`ds_trainer.engine.training_engine.loss_factor`), even if the backward pass alone would not.

**Skipping a step** that DeepSpeed considers valid (:func:`skipped_update`): its optimizer takes the path that it takes
after an overflow, which clears gradients and changes neither weights nor states. The loss scale stays unchanged. That
path consists of private names of DeepSpeed. So the optimizer inside, which alone changes weights, cannot step
meanwhile: if a version of DeepSpeed calls it all the same, the run ends with an error, and the weights are as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def enable_overflow_checks(optimizer: Any) -> None:
    """Makes ZeRO 1 and 2 check gradients that they would not check, and stages 0 to 2 check them once.

    ``check_grad_overflow`` in bf16, and stage 0 in 16 bits, cost one more pass over all gradients, one more all-reduce
    and one more device synchronization, although the norm gives the same answer. If there is a norm, only the norm is
    checked.

    Args:
        optimizer: DeepSpeed's wrapper.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if type(optimizer) is FP16_UnfusedOptimizer and not optimizer.fused_lamb_legacy:
        optimizer.overflow_checker.check = lambda: False
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    if not optimizer.compute_grad_norm:
        optimizer.check_grad_overflow = True
    elif optimizer.dtype == torch.bfloat16:
        optimizer.check_grad_overflow = True
        # With offload DeepSpeed keeps a flag while it copies gradients, at no cost.
        if type(optimizer) is DeepSpeedZeroOptimizer and not optimizer.cpu_offload:
            optimizer.check_overflow = lambda partition_gradients=True: None


def scales_loss(engine: Any) -> bool:
    """Whether DeepSpeed's ``engine`` scales the loss, so that occasional overflows are normal."""
    return bool(engine.fp16_enabled())


class SkippedStepError(RuntimeError):
    """DeepSpeed applied a step that must be skipped. Every later result would be wrong, so the run must end."""

    def __init__(self) -> None:
        import deepspeed

        super().__init__(
            f"DeepSpeed {deepspeed.__version__} applies a step that must be skipped: its optimizers differ from those "
            "that ds_trainer was tested with (ds-trainer doctor names the functions). Install a tested version "
            "(docs/reference/versions.md)."
        )


@contextmanager
def skipped_update(optimizer: Any) -> Iterator[None]:
    """Inside, a step of ``optimizer``, DeepSpeed's wrapper, clears the gradients without an update.

    Raises:
        SkippedStepError: DeepSpeed calls the optimizer that it wraps. It did not step.
    """
    with ExitStack() as undo:
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            undo.enter_context(attributes(inner, {"step": _refuse}))
        undo.enter_context(attributes(optimizer, _overflow_path(optimizer)))
        yield


def _refuse(*args: Any, **keywords: Any) -> None:
    raise SkippedStepError


@contextmanager
def attributes(owner: Any, replacements: dict[str, Any]) -> Iterator[None]:
    """Inside, ``owner`` has these attributes."""
    missing = object()
    originals = {name: vars(owner).get(name, missing) for name in replacements}
    vars(owner).update(replacements)
    try:
        yield
    finally:
        for name, value in originals.items():
            if value is missing:
                del vars(owner)[name]
            else:
                vars(owner)[name] = value


def _overflow_path(optimizer: Any) -> dict[str, Any]:
    """Replacements of attributes of ``optimizer`` that make its step behave as after an overflow."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    scale_stays: dict[str, Callable[..., Any]] = {"_update_scale": lambda *args, **kwargs: None}
    if isinstance(optimizer, DeepSpeedZeroOptimizer):

        def overflows(partition_gradients: bool = True) -> None:
            optimizer.overflow = True

        def norm() -> torch.Tensor:  # ZenFlow checks nothing else
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
            optimizer._global_grad_norm = float("inf")  # the engine clears the gradients after each step

        return {"step": cleared}
    if hasattr(optimizer, "_skip_invalid_grad_norm"):  # the 16-bit wrappers without ZeRO

        def skipped(closure: Any = None) -> Any:
            return optimizer._skip_invalid_grad_norm()

        return {"step": skipped, **scale_stays}
    return {"step": lambda closure=None: None, "overflow": True}

"""The closed lists of values that arguments may take, under the names that Hugging Face users know."""

from __future__ import annotations

from enum import Enum


class NamedValue(str, Enum):
    """A string enum that prints as its value, so that f-strings, JSON and comparisons with plain strings just work."""

    def __str__(self) -> str:
        return str(self.value)


class IntervalStrategy(NamedValue):
    """When to log, evaluate or save."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SchedulerType(NamedValue):
    """Shape of the learning rate over training; see :mod:`ds_trainer.optim.schedules`."""

    LINEAR = "linear"
    COSINE = "cosine"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"


class OptimizerNames(NamedValue):
    """Optimizers that the compiler knows how to write into the DeepSpeed JSON."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    SGD = "sgd"


class OffloadDevice(NamedValue):
    """Where ZeRO keeps optimizer states and runs the optimizer."""

    NONE = "none"
    CPU = "cpu"


class AutocastDtype(NamedValue):
    """Compute type of ``torch_autocast``: weights stay float32, safe modules run in this type."""

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"

"""DeepSpeed's optimizers for states in host memory. Their kernels are compiled at first use."""

from __future__ import annotations

import torch


def cpu_adam_class() -> type[torch.optim.Optimizer]:
    """DeepSpeed's vectorised Adam for the CPU."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam

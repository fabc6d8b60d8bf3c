"""Devices of optimizer states whose shape differs from their parameter's: step counters, factors, quantization maps.

A checkpoint is read into host memory. torch's optimizers keep ``step`` there too, unless they are fused or capturable:
then it must be on the parameter's device, and a step with a counter on the host raises an error.
``Optimizer.load_state_dict`` makes the same decision (``torch/optim/optimizer.py``,
``_process_value_according_to_param_policy``). DeepSpeed's own optimizers count with plain integers.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_trainer.engine.state.flat_partitions import FlatPartition

_STEP = "step"


def scalar_for_optimizer(partition: FlatPartition, key: str, value: Any) -> Any:
    """Converts a scalar state of ``partition`` to the type and device that its optimizer expects.

    Args:
        partition: the partition whose state it is.
        key: key of the state.
        value: a number, or a zero-dimensional tensor on the host.

    Returns:
        A new tensor on the device that the optimizer expects, or a number.
    """
    if key == _STEP:
        value = _counter_of(partition.optimizer, value)
    if not isinstance(value, torch.Tensor):
        return value
    device, present = partition.tensor.device, partition.states.get(key)
    if not (partition.group.get("fused") or partition.group.get("capturable")):
        if isinstance(present, torch.Tensor):  # the optimizer chose this device
            device = present.device
        elif key == _STEP:
            device = torch.device("cpu")
    return value.to(device, copy=True)


def _counter_of(optimizer: torch.optim.Optimizer, value: Any) -> Any:
    """``step`` as torch's optimizers (float32 tensor) or DeepSpeed's (int) store it; offload switches between them."""
    library = next((c.__module__.partition(".")[0] for c in type(optimizer).__mro__ if _is_optimizer(c)), "")
    if library == "torch" and not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float32)
    if library == "deepspeed" and isinstance(value, torch.Tensor):
        return int(value)
    return value


def _is_optimizer(of: type) -> bool:
    return of is not torch.optim.Optimizer and of.__module__.startswith(("torch.optim.", "deepspeed."))


def on_device(value: Any, device: torch.device) -> Any:
    """``value`` with all its tensors on ``device``, at any depth of mappings, lists, tuples and attributes.

    Objects keep their identity: a state of GaLore and APOLLO is an object that holds a projection matrix.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((key, on_device(of, device)) for key, of in value.items())
    if isinstance(value, (list, tuple)):
        of = [on_device(one, device) for one in value]
        return type(value)(*of) if hasattr(value, "_fields") else type(value)(of)
    if not isinstance(value, type):
        for name, of in getattr(value, "__dict__", {}).items():
            vars(value)[name] = on_device(of, device)
    return value

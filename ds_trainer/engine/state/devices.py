"""Where an optimizer keeps states of another shape than its parameter's: step counters, factors, quantization maps.

A checkpoint is read into host memory. torch's optimizers keep ``step`` there too, unless they run fused or capturable:
then it lies on the device of the parameter, and a step with a counter on the host raises. ``Optimizer.load_state_dict``
decides in the same way (``torch/optim/optimizer.py``, ``_process_value_according_to_param_policy``). DeepSpeed's own
optimizers count in plain integers.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_trainer.engine.state.units import Unit

_STEP = "step"


def scalar_as_kept(unit: Unit, key: str, value: Any) -> Any:
    """A one-number state of ``unit`` as its optimizer keeps it.

    Args:
        unit: whose optimizer it is.
        key: of the state.
        value: a number, or a tensor without dimensions on the host.

    Returns:
        A tensor of its own on the device where the optimizer wants it, or a number.
    """
    if key == _STEP:
        value = _counter_of(unit.optimizer, value)
    if not isinstance(value, torch.Tensor):
        return value
    device, present = unit.tensor.device, unit.states.get(key)
    if not (unit.group.get("fused") or unit.group.get("capturable")):
        if isinstance(present, torch.Tensor):  # the optimizer put it there itself
            device = present.device
        elif key == _STEP:
            device = torch.device("cpu")
    return value.to(device, copy=True)


def _counter_of(optimizer: torch.optim.Optimizer, value: Any) -> Any:
    """``step`` as torch's optimizers (float32 tensor) or DeepSpeed's (int) keep it: offload exchanges them."""
    library = next((c.__module__.partition(".")[0] for c in type(optimizer).__mro__ if _is_optimizer(c)), "")
    if library == "torch" and not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float32)
    if library == "deepspeed" and isinstance(value, torch.Tensor):
        return int(value)
    return value


def _is_optimizer(of: type) -> bool:
    return of is not torch.optim.Optimizer and of.__module__.startswith(("torch.optim.", "deepspeed."))


def on_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``, however deep in mappings, lists, tuples and attributes.

    An object keeps its identity: of GaLore and APOLLO, a state is one that holds the matrix of a projection.
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

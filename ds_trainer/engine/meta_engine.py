"""Creates DeepSpeed engines whose tensors are all on the meta device: shapes and partitions, but no memory.

DeepSpeed 0.19.8 asks its *accelerator* for the device of everything that it allocates, so an accelerator whose device
is meta creates the whole engine there: parameters, flat buffers, partitions, masters. Three things remain:

* Collectives on tensors without values do nothing (:func:`ds_trainer.engine.rehearsal.without_communication`).
* Offloaded states are allocated on, or copied to, the host. Inside ``deepspeed.initialize`` they stay on meta, also
  those for NVMe, of which no file is written.
* Operators (fused or CPU Adam) are not compiled and not loaded. Their names are recorded.

Such an engine cannot run a step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_trainer.engine.rehearsal import do_nothing, without_communication
from ds_trainer.engine.training_engine import TrainingEngine

_META = torch.device("meta")
_LARGE = 2**16  # elements
_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.empty_like, torch.zeros_like})


@contextmanager
def engines_on_meta() -> Iterator[list[str]]:
    """Inside, engines are created on the meta device, from models on meta (:func:`move_to_meta`).

    Needs a process group that DeepSpeed has joined.

    Yields:
        The names of DeepSpeed's operators that the engines would have loaded or compiled.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.zero import stage3

    operators: list[str] = []

    def recorded(builder: Any, verbose: bool = False) -> _Operator:
        if builder.name not in operators:
            operators.append(builder.name)
        return _Operator()

    def on_meta(initialize: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if isinstance(named.get("config"), dict):
                named["config"] = _without_files(named["config"])
            with _HostOnMeta():
                return initialize(*args, **named)

        return call

    with ExitStack() as undo:
        undo.callback(set_accelerator, get_accelerator())
        set_accelerator(_meta_accelerator())
        _replace(undo, OpBuilder, "load", recorded)
        _replace(undo, stage3, "defragment", _in_one_buffer)
        _replace(undo, deepspeed, "initialize", on_meta(deepspeed.initialize))
        undo.enter_context(without_communication())
        yield operators


def move_to_meta(model: nn.Module) -> None:
    """Replace the elements of all parameters by none. Parameters keep their identity, attributes and ties."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            empty = nn.Parameter(torch.empty_like(parameter, device=_META), requires_grad=parameter.requires_grad)
            torch._C._swap_tensor_impl(parameter, empty)


def updated_elements(engine: TrainingEngine) -> int:
    """Elements that this rank updates in a step, with DeepSpeed's padding."""
    optimizer: Any = engine.optimizer
    if engine.stage == 3:  # not the masters, which are empty if they are on NVMe
        return sum(optimizer.fp16_partitioned_groups_flat_numel)
    flat = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if flat is None:
        flat = [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]
    return sum(tensor.numel() for tensor in flat)


class _Operator:
    """Stands for a compiled operator: all its functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        return do_nothing


class _HostOnMeta(TorchFunctionMode):
    """Tensors that are allocated on the host, or copied to it from meta, are on meta. Small ones without a device, such
    as flags, are not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES:
            device = kwargs.get("device")
            if _is_host(device) or (device is None and _elements(args) >= _LARGE):
                kwargs["device"] = _META
        elif func is torch.Tensor.cpu and args[0].is_meta:
            return args[0]
        elif func is torch.Tensor.to and args[0].is_meta:
            args = tuple(_META if _is_host(arg) else arg for arg in args)
            if _is_host(kwargs.get("device")):
                kwargs["device"] = _META
        return func(*args, **kwargs)


def _elements(sizes: Sequence[Any]) -> int:
    """Elements that ``torch.empty(*sizes)`` allocates; 0 if ``sizes`` are no sizes."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    return math.prod(sizes) if sizes and all(isinstance(size, int) for size in sizes) else 0


def _is_host(device: Any) -> bool:
    return bool(device.type == "cpu" if isinstance(device, torch.device) else device == "cpu")


def _without_files(config: dict[str, Any]) -> dict[str, Any]:
    """A copy that offloads to the host what ``config`` offloads to NVMe, where DeepSpeed would write it."""
    config = copy.deepcopy(config)
    for name in ("offload_optimizer", "offload_param"):
        offload = config.get("zero_optimization", {}).get(name)
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            offload["device"] = "cpu"
    return config


def _in_one_buffer(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """DeepSpeed's ``defragment`` (``runtime/zero/utils.py``), which moves tensors through host memory."""
    buffer = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=_META)
    start = 0
    for tensor in tensors:
        tensor.data = buffer.narrow(0, start, tensor.numel())
        start += tensor.numel()
    return buffer


def _replace(undo: ExitStack, owner: Any, name: str, by: Callable[..., Any]) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, by)


def _meta_accelerator() -> Any:
    """An accelerator of DeepSpeed whose device is meta, and that supports all dtypes."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class MetaAccelerator(CPU_Accelerator):
        def __init__(self) -> None:
            super().__init__()
            self._name = "meta"

        def device_name(self, device_index: int | None = None) -> str:
            return "meta"

        def current_device_name(self) -> str:
            return "meta"

        def is_fp16_supported(self) -> bool:
            return True

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.is_meta

        def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
            return torch.empty_like(tensor, device=_META)

    return MetaAccelerator()

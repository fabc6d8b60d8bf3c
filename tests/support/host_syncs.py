"""What would make the host wait on a GPU, found in a run on CPUs.

On a CPU, device and host are the same memory, and nothing waits. :class:`PretendedDevice` tells them apart: the trainer
and DeepSpeed are given the device ``cpu:0``, and a tensor counts as a *device* tensor if it was made or copied there,
or was computed from one. Host tensors are all others. Two modes of torch see every operation of the thread (autograd's
and DeepSpeed's included, since a backward pass on the CPU runs in the caller's thread), and record what on CUDA blocks
until the device has got there:

* reading a device tensor: ``item``, ``bool``, ``int``, ``float``, ``tolist``, ``numpy``, ``cpu``, ``to("cpu")``, print;
* operations whose output size depends on values: ``nonzero``, ``unique``, ``masked_select``, indexing by a mask;
* copies between host and device without ``non_blocking``, ``torch.tensor(..., device=)`` among them, which copies from
  pageable memory;
* ``synchronize`` of a device, a stream or an event;
* collectives of Python objects, whose lengths are read;
* collectives that have no business on a device, or the device on them: a device tensor in a group for host memory.

A collective between hosts that is waited for is recorded as ``host collective``: it waits for the slowest host, and the
device goes on. So that the two are not mixed up, the default group counts as NCCL's: what is for tensors in host memory
gets a group of its own, as on GPUs.

What ``torch.cuda.set_sync_debug_mode`` warns of on a GPU is the model for this list.

Every record names the line of code that asked: the innermost one outside of torch and of this file, with all that
called it, so that what DeepSpeed or a model does can be distinguished from what this package does.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import typing_extensions
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ds_trainer.monitor.health import waits

DEVICE = torch.device("cpu", 0)
"""Stands for a GPU. A tensor does not keep the index, but every request for a device shows it."""

# Who asks is somebody else than these: torch, this file, and decorators; the wrapper around every wait of the process.
_PASSED_OVER = (__file__, *(str(Path(one.__file__ or "")) for one in (typing_extensions, contextlib, mock, waits)))
_PASSED_OVER = (*_PASSED_OVER, str(Path(torch.__file__).parent))
_READS = {
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "array": torch.Tensor.__array__,
    "print": torch.Tensor.__repr__,
}
_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_OBJECT_COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "monitored_barrier"),
)


@dataclass(frozen=True)
class HostSync:
    """One wait of the host.

    Attributes:
        kind: what was done.
        stack: ``file:line function``, innermost first, without torch; files of this repository relative to it.
    """

    kind: str
    stack: tuple[str, ...]

    @property
    def location(self) -> str:
        """File and function that asked."""
        return self.stack[0].split(":")[0] + " " + self.stack[0].split(" ")[1] if self.stack else "?"

    @property
    def origin(self) -> str:
        """Top folder of who asked: ``ds_trainer``, ``deepspeed``, ``transformers``, ``tests``."""
        return self.location.split("/")[0]

    def passes(self, name: str) -> bool:
        """Whether a function ``name`` is on the way."""
        return any(line.endswith(f" {name}") for line in self.stack)


class PretendedDevice:
    """Runs code as if ``cpu:0`` were a GPU, and records where the host would wait for it.

    Attributes:
        records: what was found while :attr:`watching`.
        watching: whether to record; device tensors are followed all the time.
    """

    def __init__(self) -> None:
        self.records: list[HostSync] = []
        self.watching = False
        self._storages: dict[int, StorageWeakRef] = {}
        self._quiet = 0
        self._host_groups: set[str] = set()

    # -- which tensors are the device's -------------------------------------------------------------------------

    def put(self, *tensors: torch.Tensor) -> None:
        """Let ``tensors``, and all that share memory with them, count as the device's."""
        for tensor in tensors:
            if tensor.layout == torch.strided and not tensor.is_meta:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._storages[reference.cdata] = reference

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which was copied to host memory."""
        self._storages.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is a tensor of the device."""
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return False
        return value.untyped_storage()._cdata in self._storages

    def any_in(self, tree: Any) -> bool:
        """Whether a tensor of the device is among the leaves."""
        return any(self.holds(leaf) for leaf in tree_iter(tree))

    # -- what is recorded -----------------------------------------------------------------------------------------

    def note(self, kind: str) -> None:
        """The host would wait here."""
        if self.watching and not self._quiet:
            self.records.append(HostSync(kind, _stack(sys._getframe(1))))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, nothing is recorded: the whole was recorded already."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    @contextmanager
    def pretended(self) -> Iterator[PretendedDevice]:
        """Inside, trainers that are made believe in the device."""
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        from ds_trainer import TrainingArguments
        from ds_trainer.parallel.groups import forget_groups
        from ds_trainer.utils import distributed

        with ExitStack() as contexts:

            def replace(owner: Any, name: str, value: Any) -> None:
                contexts.enter_context(mock.patch.object(owner, name, value))

            forget_groups()
            contexts.callback(forget_groups)
            replace(dist, "get_backend", lambda group=None: "nccl")
            replace(dist, "new_group", self._noting_host_groups(dist.new_group))
            replace(TrainingArguments, "device", property(lambda self: DEVICE))
            replace(distributed, "collective_device", lambda: DEVICE)
            replace(CPU_Accelerator, "device_name", lambda self, index=None: "cpu" if index is None else "cpu:0")
            replace(CPU_Accelerator, "current_device_name", lambda self: "cpu:0")
            for owner in (torch.cuda, torch.accelerator, torch.cuda.Stream, torch.cuda.Event, CPU_Accelerator):
                replace(owner, "synchronize", self._noting("synchronize", lambda *args, **keywords: None))
            replace(torch.Tensor, "__reduce_ex__", self._noting_pickles(torch.Tensor.__reduce_ex__))
            for name in _OBJECT_COLLECTIVES:
                for module in (dist, dist.distributed_c10d):
                    replace(module, name, self._noting_objects(name, getattr(module, name)))
            replace(clip_grad, "_group_tensors_by_device_and_dtype", self._grouped)
            contexts.enter_context(_Calls(self))
            contexts.enter_context(_Operations(self))
            yield self

    def _noting_pickles(self, original: Any) -> Any:
        def reduced(tensor: torch.Tensor, protocol: Any) -> Any:
            if self.holds(tensor):
                self.note("pickle")
            with self.quiet():
                return original(tensor, protocol)

        return reduced

    def _noting_host_groups(self, original: Any) -> Any:
        def new_group(*args: Any, **keywords: Any) -> Any:
            group = original(*args, **keywords)
            if keywords.get("backend") == "gloo" and isinstance(group, dist.ProcessGroup):
                self._host_groups.add(group.group_name)
            return group

        return new_group

    def is_for_hosts(self, group: Any) -> bool:
        """Whether ``group`` is one for tensors in host memory."""
        return group is not None and group.group_name in self._host_groups

    def _noting_objects(self, name: str, original: Any) -> Any:
        def noting(*args: Any, **keywords: Any) -> Any:
            groups = [value for value in (*args, *keywords.values()) if isinstance(value, dist.ProcessGroup)]
            for_hosts = any(map(self.is_for_hosts, groups))
            self.note(f"host collective {name}" if for_hosts else f"{name} over the device")
            with self.quiet():
                return original(*args, **keywords)

        return noting

    def _grouped(self, tensors: Any, with_indices: bool = False) -> Any:
        """torch's own function, which reads the device where no mode sees it."""
        found = _group_tensors_by_device_and_dtype(tensors, with_indices)
        return {
            (DEVICE if self.any_in(lists) else device, dtype): (lists, indices)
            for (device, dtype), (lists, indices) in found.items()
        }

    def _noting(self, kind: str, original: Any) -> Any:
        def noting(*args: Any, **keywords: Any) -> Any:
            self.note(kind)
            with self.quiet():
                return original(*args, **keywords)

        return noting


class _Calls(TorchFunctionMode):
    """What never becomes an operation on a CPU: conversions, reading, asking for the device."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self._device
        first = args[0] if args else None
        if function == _DEVICE_OF:
            return DEVICE if device.holds(first) else function(*args, **kwargs)
        if function is torch.Tensor.to and len(args) > 1 and device.holds(args[1]):  # like another tensor
            args = (first, DEVICE, args[1].dtype, *args[2:])
        if function in _READS.values() and device.holds(first):
            device.note(next(name for name, one in _READS.items() if one is function))
            with device.quiet():
                return function(*args, **kwargs)
        if function is torch.tensor and not isinstance(first, torch.Tensor) and device.any_in(first):
            device.note("torch.tensor of tensors on the device")
        if function is torch.as_tensor and device.holds(first) and _asked_device(kwargs) == torch.device("cpu"):
            return self._moved(torch.Tensor.to, (first, torch.device("cpu")), {})
        makes = function in (torch.tensor, torch.as_tensor) and _asked_device(kwargs) == DEVICE
        if makes and device.holds(first):
            return function(*args, **kwargs)
        if makes or (function is torch.Tensor.new_tensor and device.holds(first) and not device.holds(args[1])):
            device.note(f"{function.__name__} on the device")
            with device.quiet():
                result = function(*args, **kwargs)
                result = result.clone() if isinstance(first, torch.Tensor) else result
            device.put(result)
            return result
        if function in (torch.Tensor.cpu, torch.Tensor.to) and device.holds(first):
            return self._moved(function, args, kwargs)
        return function(*args, **kwargs)

    def _moved(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of the device: copied to the host, or it stays."""
        device = self._device
        wanted = torch.device("cpu") if function is torch.Tensor.cpu else _device_among(args[1:], kwargs)
        if wanted is None or wanted == DEVICE or device.any_in(args[1:]):
            with device.quiet():
                result = function(*args, **kwargs)
            device.put(result)
            return result
        if not _non_blocking(args[1:], kwargs):
            device.note("cpu()" if function is torch.Tensor.cpu else "to the host")
        with device.quiet():  # memory of its own, as on a GPU
            result = function(*args, **kwargs)
            shares_memory = result.untyped_storage()._cdata == args[0].untyped_storage()._cdata
            return device.take(result.clone() if shares_memory else result)


class _Operations(TorchDispatchMode):
    """Every operation: who computes where, what is copied, what must be known on the host."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self._device
        there = device.any_in((args, kwargs))
        name = function.overloadpacket.__name__
        if function.namespace == "c10d":
            return self._collective(function, name, there, args, kwargs)
        to_device = there
        if name == "_to_copy":
            # Away from the device only _Calls knows of: to the C++ of torch, which names the device of a change of type
            # too (autograd does in every one), it is "cpu".
            to_device = there or _asked_device(kwargs) == DEVICE
            if to_device != there and not kwargs.get("non_blocking", False):
                device.note("copy to the device")
        elif name == "copy_":
            target, source = device.holds(args[0]), device.holds(args[1])
            if target != source and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                device.note("copy to the device" if target else "copy to the host")
            to_device = target
        elif _asked_device(kwargs) is not None:
            to_device = _asked_device(kwargs) == DEVICE
        elif there and _reads_values(function, name, args):
            device.note("item" if name == "_local_scalar_dense" else name)
        result = function(*args, **kwargs)
        if to_device:
            device.put(*(leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)))
        return result

    def _collective(self, function: Any, name: str, there: bool, args: Any, kwargs: Any) -> Any:
        device = self._device
        scripted = next((value for value in args if isinstance(value, torch.ScriptObject)), None)
        for_hosts = scripted is not None and device.is_for_hosts(dist.ProcessGroup.unbox(scripted))
        if there == for_hosts:
            device.note(f"{name} of {'the device in a group of hosts' if there else 'the host in a group of devices'}")
        elif for_hosts and not _asynchronous():
            device.note(f"host collective {name}")
        result = function(*args, **kwargs)
        if there:  # what is received lies where the rest does
            device.put(*(leaf for leaf in tree_iter((args, result)) if isinstance(leaf, torch.Tensor)))
        return result


def _reads_values(function: Any, name: str, args: Any) -> bool:
    """Whether the host must know values to continue."""
    if name in ("index", "index_put", "index_put_"):
        masks = [one for one in args[1] if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)]
        fills = name != "index" and args[2].dim() == 0  # becomes masked_fill
        return bool(masks) and not fills
    tags = function.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _asynchronous() -> bool:
    """Whether the collective under way was begun with ``async_op``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d" and "async_op" in frame.f_locals:
            return bool(frame.f_locals["async_op"])
        frame = frame.f_back
    return False


def _asked_device(kwargs: Any) -> torch.device | None:
    wanted = kwargs.get("device")
    return None if wanted is None else torch.device(wanted)


def _device_among(args: Any, kwargs: Any) -> torch.device | None:
    """The device that ``Tensor.to`` is asked for; None where it only changes the type."""
    for value in (*args, kwargs.get("device")):
        if isinstance(value, (str, torch.device)):
            return torch.device(value)
    other = next((value for value in (*args, kwargs.get("other")) if isinstance(value, torch.Tensor)), None)
    return None if other is None else torch.device("cpu")


def _non_blocking(args: Any, kwargs: Any) -> bool:
    flags = [value for value in args if isinstance(value, bool)]
    return bool(kwargs.get("non_blocking", flags[0] if flags else False))


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    lines = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PASSED_OVER):
            lines.append(f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(lines)


def _short(path: str) -> str:
    return path.rpartition("/site-packages/")[2].removeprefix(f"{Path(__file__).parents[2]}/")


def counted(records: list[HostSync]) -> Counter[tuple[str, str]]:
    """How often each kind occurs at each location."""
    return Counter((record.kind, record.location) for record in records)

"""Inputs of checkpointed layers in host memory, from the forward pass of a layer until its backward pass.

With activation checkpointing a model keeps one tensor per layer, the layer's input. At a million tokens these are the
largest that is left. They are copied to page-locked host memory on a stream of their own while the layer computes, and
back while the backward pass of the layer above computes. What bounds the memory:

* Host: a pool with as many buffers as there are checkpointed layers. If all are in use (several forward passes before a
  backward pass), a tensor stays on the device.
* Device: the tensors of the last two layers. The compute stream waits for the copy of the layer before these, and only
  then is its tensor released. So no other use of its memory can overtake the copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ds_trainer.arguments.completion import as_mapping
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.config.compiled import CompiledConfig
from ds_trainer.utils.errors import ConfigError

SMALLEST = 2**20
"""Bytes of a tensor from which it is moved."""
_IN_TRANSIT = 2  # tensors on the device whose copies may not be complete
_FUNCTION = "_gradient_checkpointing_func"  # of transformers' layers


def offloads_activations(args: TrainingArguments) -> bool:
    """Whether a run moves the inputs of checkpointed layers to the host."""
    if args.activation_offload is None:
        return bool(args.long_context and args.activation_checkpointing) and args.device_type != "cpu"
    return args.activation_offload


def offload_problems(args: TrainingArguments, config: CompiledConfig) -> list[str]:
    """Reasons why ``activation_offload`` cannot be applied, one sentence each."""
    if not offloads_activations(args):
        return []
    problems = []
    if not args.activation_checkpointing:
        problems.append(
            "activation_offload=True moves the inputs of checkpointed layers, but activation_checkpointing is off. Set "
            "it to True."
        )
    block = config.activation_checkpointing
    if block is not None:
        problems.append(
            f"activation_offload=True and {block.source}: DeepSpeed's activation checkpointing keeps the inputs of "
            "layers itself. Use one of the two (in DeepSpeed, cpu_checkpointing moves them to the host)."
        )
    if (as_mapping(args.activation_checkpointing_kwargs) or {}).get("offload"):
        problems.append(
            "activation_offload=True and activation_checkpointing_kwargs.offload move the same tensors. Remove offload."
        )
    return problems


def offload_activations(model: nn.Module) -> ActivationOffload:
    """Makes the checkpointed layers of ``model`` keep their inputs in host memory.

    Call it after activation checkpointing was enabled, which undoes it.

    Raises:
        ConfigError: the model has no layer whose checkpointing function can be replaced.
    """
    owners: list[Any] = [
        module
        for module in model.modules()
        if callable(getattr(module, _FUNCTION, None)) and getattr(module, "gradient_checkpointing", True)
    ]
    if not owners:
        raise ConfigError(
            f"activation_offload=True, but {type(model).__name__} has no layers whose checkpointing can be replaced "
            f"({_FUNCTION}, as the layers of transformers' models have it). Set it to False."
        )
    layers = 0
    for owner in owners:  # layers, and models that only say that they can; in older models those that call the layers
        if not any(callable(getattr(part, _FUNCTION, None)) for part in owner.modules() if part is not owner):
            layers += sum(len(part) for part in owner.children() if isinstance(part, nn.ModuleList)) or 1
    offload = ActivationOffload(layers)
    for owner in owners:
        setattr(owner, _FUNCTION, offload.around(getattr(owner, _FUNCTION)))
    return offload


class HostBuffers:
    """A pool of buffers in host memory.

    Args:
        limit: number of buffers that exist at most.

    Attributes:
        limit: see above.
        bytes: size of the buffers that exist.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._number = 0
        self._free: list[Tensor] = []

    def take(self, size: int, pinned: bool) -> Tensor | None:
        """A buffer of at least ``size`` bytes; None if as many as may exist are in use."""
        fitting = [buffer for buffer in self._free if len(buffer) >= size]
        if not fitting:
            if self._number == self.limit:
                if not self._free:
                    return None
                self._drop(min(self._free, key=len))
            self._number += 1
            self.bytes += size
            return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        best = min(fitting, key=len)
        self._remove(best)
        return best

    def give(self, buffer: Tensor) -> None:
        """Return a buffer that is no longer used."""
        self._free.append(buffer)

    def _drop(self, buffer: Tensor) -> None:
        self._remove(buffer)
        self._number -= 1
        self.bytes -= len(buffer)

    def _remove(self, buffer: Tensor) -> None:
        self._free = [other for other in self._free if other is not buffer]


class ActivationOffload:
    """Moves tensors to the host and back.

    Args:
        layers: number of checkpointed layers.

    Attributes:
        buffers: the host memory.
        stored: tensors that were moved to the host so far.
    """

    def __init__(self, layers: int) -> None:
        self.buffers = HostBuffers(layers)
        self.stored = 0
        self._streams: dict[torch.device, Any] = {}
        self._outgoing: deque[weakref.ref[_Stored]] = deque()
        self._last: weakref.ref[_Stored] | None = None

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """``checkpoint``, torch's or one with its signature, with the inputs of the function in host memory."""

        def offloaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # Not masks and positions: all layers share one of them, which would be copied for each.
            inputs = {_place(a) for a in args if isinstance(a, Tensor) and a.requires_grad and a.nbytes >= SMALLEST}

            def pack(tensor: Tensor) -> Tensor | _Stored:
                if _place(tensor) not in inputs or isinstance(tensor, nn.Parameter) or not tensor.is_contiguous():
                    return tensor
                buffer = self.buffers.take(tensor.nbytes, pinned=tensor.device.type == "cuda")
                if buffer is None:
                    return tensor
                stored = _Stored(self, buffer, tensor, self._last)
                self.stored += 1
                self._last = weakref.ref(stored)
                self._outgoing.append(self._last)
                while len(self._outgoing) > _IN_TRANSIT:
                    oldest = self._outgoing.popleft()()
                    if oldest is not None:
                        # Release the tensor on the device, when its copy is complete.
                        oldest._wait()
                        oldest._on_device = None
                return stored

            with saved_tensors_hooks(pack, _unpacked):
                return checkpoint(function, *args, **kwargs)

        return offloaded

    def stream(self, device: torch.device) -> Any:
        """The stream of the copies from and to ``device``; None for the CPU."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def arrived(self, stored: _Stored) -> None:
        """``stored`` is needed on the device: it does not leave it any more."""
        self._outgoing = deque(other for other in self._outgoing if other() is not stored)


class _Stored:
    """A tensor in host memory; while copies are running, also on the device."""

    def __init__(
        self, offload: ActivationOffload, buffer: Tensor, tensor: Tensor, before: weakref.ref[_Stored] | None
    ) -> None:
        self._offload, self._buffer, self._before = offload, buffer, before
        self._host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._device = tensor.device
        self._stream = offload.stream(tensor.device)
        self._on_device: Tensor | None = tensor
        self._copied = self._copy(self._host, tensor)

    def fetch(self) -> None:
        """Start to copy the tensor to the device, unless it is there."""
        if self._on_device is None:
            self._on_device = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            self._copied = self._copy(self._on_device, self._host)

    def tensor(self) -> Tensor:
        """The tensor on the device; the one of the layer below begins to come."""
        self._offload.arrived(self)
        self.fetch()
        below = None if self._before is None else self._before()
        if below is not None:
            below.fetch()
        self._wait()
        assert self._on_device is not None
        return self._on_device

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy on the stream of copies, after the present work of the compute stream. Returns the event of its end."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _wait(self) -> None:
        """The compute stream waits for the copy."""
        if self._copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def __del__(self) -> None:
        # Later copies use the same stream, so the buffer can be used again now. The tensor's memory on the device can
        # not, before the compute stream has waited for a copy that nobody needed.
        self._wait()
        self._offload.buffers.give(self._buffer)


def _unpacked(packed: Tensor | _Stored) -> Tensor:
    return packed.tensor() if isinstance(packed, _Stored) else packed


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape

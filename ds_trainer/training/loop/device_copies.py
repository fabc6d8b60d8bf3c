"""Copies of micro-batches to the device, each while the one before it computes.

While the device computes a micro-batch, the host begins to copy the next one on a stream of its own; the compute stream
waits for the copy, the host does not. Only micro-batches that were fetched for the present step are copied ahead, so
what was read from the loader is what is trained, and the data cursor needs no correction. At most one micro-batch is
copied ahead. The copy of the first one of a step runs beside the update before it, since the host is ahead of the
device.

A tensor is copied ahead if it is page-locked; copies from other memory make the host wait. A method of a subclass that
replaces a tensor, or changes it in place, gets what it made: a copy is used for the same, unchanged tensor only. If
nobody asks for a copy (an overridden ``_prepare_inputs``), no further ones are made.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from ds_trainer.data.batch_structure import Dummy
from ds_trainer.data.sharded_batch import ShardedBatch


def on_device(
    value: Any,
    device: torch.device,
    float_type: torch.dtype | None = None,
    copied: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> Any:
    """Copy tensors, also inside of dicts, lists, tuples and dataclasses, to ``device``; other objects by their ``to``.

    Copies from pinned memory do not wait. A dummy becomes an object of its original type.

    Args:
        value: a batch or a part of it; other values are kept.
        device: the target.
        float_type: the new dtype of floating-point tensors; None keeps theirs.
        copied: the copy of a tensor, if there is one already.
    """
    if isinstance(value, Dummy) and value.of is not None:
        value = value.of
    if isinstance(value, torch.Tensor):
        found = None if copied is None else copied(value)
        if found is not None:
            return found
        dtype = float_type if value.is_floating_point() else None
        return value.to(device, dtype, non_blocking=True)
    if isinstance(value, Mapping):
        items = {key: on_device(part, device, float_type, copied) for key, part in value.items()}
        if isinstance(value, dict) or not isinstance(value, MutableMapping):
            return items
        moved: Any = copy.copy(value)  # a BatchEncoding, say, which scripts read by attribute
        moved.update(items)
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(part, device, float_type, copied) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(part, device, float_type, copied) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            part = on_device(getattr(value, field.name), device, float_type, copied)
            object.__setattr__(changed, field.name, part)  # it may be frozen
        return changed
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)
    return value


class CopyStream:
    """A stream for copies to a device that is no CPU.

    Args:
        device: the target.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def copies(self, tensors: list[torch.Tensor], float_type: torch.dtype | None) -> tuple[list[torch.Tensor], Any]:
        """Begin to copy; returns the copies and the event of their end."""
        with self._stream:
            copies = [on_device(tensor, self._device, float_type) for tensor in tensors]
        return copies, self._stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Let the compute stream wait for an event."""
        torch.accelerator.current_stream(self._device).wait_event(event)

    def computes_with(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a copy, which belongs to this stream, until the compute stream is done with it."""
        tensor.record_stream(torch.accelerator.current_stream(self._device))


class DeviceCopies:
    """Micro-batches on the device.

    Args:
        device: the target.
        stream: where copies run; None copies when a micro-batch is needed, as for CPUs.

    Attributes:
        float_type: the new dtype of floating-point tensors; None keeps theirs.
    """

    def __init__(self, device: torch.device, stream: CopyStream | None) -> None:
        self.float_type: torch.dtype | None = None
        self._device = device
        self._stream = stream
        self._held: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}  # host tensor, its version, its copy
        self._event: Any = None
        self._asked = True

    @classmethod
    def to(cls, device: torch.device) -> DeviceCopies:
        """Copies to ``device``, ahead if it is no CPU."""
        return cls(device, None if device.type == "cpu" else CopyStream(device))

    @property
    def ahead(self) -> bool:
        """Whether micro-batches are copied ahead."""
        return self._stream is not None

    def begin(self, batch: Any) -> None:
        """Begin to copy ``batch``, which the step runs next."""
        if self._stream is None:
            return
        self._held.clear()  # what nobody took
        if not self._asked:
            self._stream = None
            return
        # The page-locked tensors of a batch, each once.
        value = batch.local if isinstance(batch, ShardedBatch) else batch
        by_id: dict[int, torch.Tensor] = {}
        parts = [value]
        while parts:
            part = parts.pop()
            if isinstance(part, torch.Tensor):
                if part.device.type == "cpu" and not part.is_inference() and part.is_pinned():
                    by_id[id(part)] = part
            elif isinstance(part, Mapping):
                parts.extend(part.values())
            elif isinstance(part, (list, tuple)):
                parts.extend(part)
        tensors = list(by_id.values())
        if not tensors:
            return
        copies, self._event = self._stream.copies(tensors, self.float_type)
        self._held = {id(tensor): (tensor, tensor._version, copy) for tensor, copy in zip(tensors, copies, strict=True)}
        self._asked = False

    def take(self, batch: Any) -> Any:
        """``batch`` on the device, as :func:`on_device` returns it."""
        if self._stream is None or not self._held:
            return on_device(batch, self._device, self.float_type)
        if not self._asked:
            self._stream.wait_for(self._event)
            self._asked = True
        return on_device(batch, self._device, self.float_type, self._taken)

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor | None:
        host, version, copy = self._held.pop(id(tensor), (None, 0, tensor))
        if host is not tensor or tensor._version != version:
            return None
        assert self._stream is not None
        self._stream.computes_with(copy)
        return copy

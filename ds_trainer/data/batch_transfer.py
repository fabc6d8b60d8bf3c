"""Sends a batch from one rank to the others of a group: one message for small batches, two for large ones.

The batch is pickled without its tensors, so that its type and other contents are preserved. The tensors follow as
bytes; the received tensors are views of one buffer.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FIRST = 64 * 1024  # bytes of the first message, whose size the others know
_ALIGNMENT = 64  # bytes; suits tensors of every dtype
_NUMBERS = 2 * 8  # bytes: length of the pickled part, length of everything


class _TensorSpec(NamedTuple):
    """Offset of a tensor in the bytes that follow, and its shape, dtype and device."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


class _Pickler(pickle.Pickler):
    """Collects plain tensors instead of pickling them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[_TensorSpec, torch.Tensor]] = []
        self.size = 0
        self._known: dict[int, _TensorSpec] = {}  # by the id of a tensor

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None  # torch pickles the others
        known = self._known.get(id(obj))
        if known is not None:  # under two names
            return tuple(known)
        spec = self._known[id(obj)] = _TensorSpec(self.size, tuple(obj.shape), obj.dtype, obj.device.type)
        self.tensors.append((spec, obj))
        self.size += _rounded(obj.numel() * obj.element_size())
        return tuple(spec)


class _Unpickler(pickle.Unpickler):
    """Inserts the received tensors."""

    def __init__(self, pickled: bytes, payload: torch.Tensor) -> None:
        super().__init__(io.BytesIO(pickled))
        self._payload = payload

    def persistent_load(self, pid: Any) -> torch.Tensor:
        spec = _TensorSpec(*pid)
        size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        tensor = self._payload[spec.start : spec.start + size].view(spec.dtype).view(spec.shape)
        return tensor if spec.device_type == "cpu" else tensor.to(spec.device_type)


def send(value: Any, group: ProcessGroup, to: int | None = None) -> None:
    """Send ``value`` from the first rank of ``group`` to its others, which call :func:`receive`. Collective.

    Args:
        value: anything that can be pickled.
        group: its backend must support tensors in host memory.
        to: the only rank of the group that receives; None: all of them.

    Raises:
        ConfigError: ``value`` contains something that cannot be pickled; then nothing has been sent.
    """
    message = _message(value)
    for part in (message[:_FIRST], message[_FIRST:]):
        if to is None and len(part):
            _broadcast(part, group)
        elif len(part):
            dist.send(part, group=group, group_dst=to)


def _message(value: Any) -> torch.Tensor:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            "A batch cannot be sent from the rank that reads it to the others that work on the same samples "
            f"({error}). Make the data_collator return tensors, numbers and strings."
        ) from error
    pickled = file.getbuffer()
    start = _rounded(_NUMBERS + len(pickled))
    message = torch.empty(max(_FIRST, start + pickler.size), dtype=torch.uint8)
    message[:_NUMBERS].view(torch.int64).copy_(torch.tensor([len(pickled), start + pickler.size]))
    message[_NUMBERS : _NUMBERS + len(pickled)] = torch.frombuffer(pickled, dtype=torch.uint8)
    for spec, tensor in pickler.tensors:
        if tensor.numel():
            target = message[start + spec.start :][: tensor.numel() * spec.dtype.itemsize]
            target.view(spec.dtype).view(spec.shape).copy_(tensor.detach())
    return message


def receive(group: ProcessGroup, pin_memory: bool = False, alone: bool = False) -> Any:
    """Receive the value that the first rank of ``group`` sends. Collective.

    Args:
        group: its backend must support tensors in host memory.
        pin_memory: put tensors in page-locked memory, for copies to a GPU.
        alone: the value is sent to this rank only.
    """
    message = torch.empty(_FIRST, dtype=torch.uint8, pin_memory=pin_memory)
    _take(message, group, alone)
    length, total = message[:_NUMBERS].view(torch.int64).tolist()
    if total > _FIRST:
        whole = torch.empty(total, dtype=torch.uint8, pin_memory=pin_memory)
        whole[:_FIRST] = message
        _take(whole[_FIRST:], group, alone)
        message = whole
    pickled = message[_NUMBERS : _NUMBERS + length].numpy().tobytes()
    return _Unpickler(pickled, message[_rounded(_NUMBERS + length) :]).load()


def _take(tensor: torch.Tensor, group: ProcessGroup, alone: bool) -> None:
    if alone:
        dist.recv(tensor, group=group, group_src=0)
    else:
        _broadcast(tensor, group)


def _broadcast(tensor: torch.Tensor, group: ProcessGroup) -> None:
    dist.broadcast(tensor, group=group, group_src=0)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

"""Bytes of the tensors that exist in a process: now, and at most since a moment. Every allocation is seen."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the storages that operations return while the mode is active, until they are freed.

    Tensors that an operator uses inside (work space of a kernel) are not seen, nor are those that existed before.

    Attributes:
        now: bytes of the storages that exist.
        peak: largest value of ``now`` since :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # by address

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out tensors that exist: an operation that returns a view of one does not count its storage."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._sizes[storage._cdata] = storage.nbytes()

    def reset_peak(self) -> None:
        """Begin a new peak with what exists now."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(address)
        if known == size:
            return
        if known is None:
            weakref.finalize(storage, self._remove, address)
        self._sizes[address] = size
        self.now += size - (known or 0)  # resized in place otherwise
        self.peak = max(self.peak, self.now)

    def _remove(self, address: int) -> None:
        self.now -= self._sizes.pop(address)

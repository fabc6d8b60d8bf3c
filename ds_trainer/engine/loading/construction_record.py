"""Records how the constructor of a model initializes its parameters, which move to meta when registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_trainer.engine.loading.initialization_record import InitializationRecorder, storage_of
from ds_trainer.engine.loading.initialization_steps import Region, Step, TensorRecord

_MAX_RECORDED_NUMEL = 2**22  # of values that a constructor computes, such as `nn.Parameter(torch.ones(n))`
_UNSET = 0  # the source of values that have not been set yet

_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}

_constructed = WeakIdKeyDictionary()


def construction_record(tensor: torch.Tensor) -> TensorRecord | None:
    """Returns how the constructor initialized a parameter on meta; None if unknown or not repeatable on any shard."""
    record: TensorRecord | None = _constructed.get(tensor)
    if record is None or record.computed or not record.initialized:
        return None
    return record


class ConstructionRecorder(InitializationRecorder):
    """Records the operations on parameters, from their creation until the recorder exits."""

    def __init__(self) -> None:
        super().__init__({})

    def register(self, real: torch.Tensor, on_meta: nn.Parameter) -> None:
        """Record that ``real`` is about to be replaced by ``on_meta``."""
        name = str(len(self.tensors))
        record = TensorRecord(real.dtype, real.numel())
        if not self.sources_of(real) and real.numel() <= _MAX_RECORDED_NUMEL:
            record.steps.append(
                Step("value", torch.Tensor.copy_, (real.detach().cpu().reshape(-1).clone(),), {}, Region())
            )
        self.set_sources(real, frozenset({name}))  # keeps its storage address unique
        self._names[storage_of(real)] = self._names[storage_of(on_meta)] = name
        self.tensors[name] = _constructed[on_meta] = record

    def execute(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Execute an operation on meta tensors and record it."""
        output = super().execute(func, args, kwargs, written)
        if func.overloadpacket in _EMPTY:
            self.set_sources(output, frozenset({_UNSET}))
        return output

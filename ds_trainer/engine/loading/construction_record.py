"""What the constructor of a model does to its parameters, which are on meta as soon as they are registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_trainer.engine.loading.initialization_record import Recorder, storage_of
from ds_trainer.engine.loading.initialization_steps import Step, TensorRecord, View

_KEPT_NUMEL = 2**22  # of numbers that a constructor computes, such as `nn.Parameter(torch.ones(n))`
_BLANK = 0  # the source of numbers that nobody has set yet

_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}

_constructed = WeakIdKeyDictionary()


def constructed(tensor: torch.Tensor) -> TensorRecord | None:
    """How its constructor initialized a parameter on meta, if somebody saw it and it can be repeated on any piece."""
    record: TensorRecord | None = _constructed.get(tensor)
    if record is None or record.computed or not record.initialized:
        return None
    return record


class ConstructionRecorder(Recorder):
    """Writes down what happens to parameters, from when they are made until it ends."""

    def __init__(self) -> None:
        super().__init__({})

    def register(self, real: torch.Tensor, on_meta: nn.Parameter) -> None:
        """``real`` is about to be replaced by ``on_meta``."""
        name = str(len(self.tensors))
        record = TensorRecord(real.dtype, real.numel())
        if not self.sources_of(real) and real.numel() <= _KEPT_NUMEL:
            record.steps.append(
                Step("value", torch.Tensor.copy_, (real.detach().cpu().reshape(-1).clone(),), {}, View())
            )
        self._note(real, frozenset({name}))  # its address stays its own
        self._names[storage_of(real)] = self._names[storage_of(on_meta)] = name
        self.tensors[name] = _constructed[on_meta] = record

    def execute(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        output = super().execute(func, args, kwargs, written)
        if func.overloadpacket in _EMPTY:
            self._note(output, frozenset({_BLANK}))
        return output

"""Weights of a PEFT model: the adapter alone, as ``PeftModel.from_pretrained`` reads it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from ds_trainer.engine.weights import gathered
from ds_trainer.utils import distributed


def saves_adapters(model: Any) -> bool:
    """Whether ``model`` is saved as its adapters: peft's wrapper, or a Hugging Face model with adapters put in.

    peft itself cannot save its mixed models (several kinds of adapters at once); all their weights are written.
    """
    peft = sys.modules.get("peft")
    return bool(peft and isinstance(model, peft.PeftModel)) or bool(getattr(model, "_hf_peft_config_loaded", False))


def save_adapters(model: Any, directory: Path) -> None:
    """Write each adapter's weights and configuration to ``directory``. Collective: the main process writes.

    Under ZeRO-3 only what belongs to the adapters is gathered, never the frozen model.
    """
    tensors = model.state_dict(keep_vars=True)
    adapted = {id(tensor) for tensor in _adapter_tensors(model, tensors)}
    names = [name for name, tensor in tensors.items() if id(tensor) in adapted or tensor.requires_grad]
    with gathered([tensors[name] for name in names if isinstance(tensors[name], nn.Parameter)]):
        if distributed.rank() == 0:
            whole = {name: tensors[name].detach().cpu().clone() for name in names}
            model.save_pretrained(str(directory), state_dict=whole)
    distributed.barrier()


def _adapter_tensors(model: Any, tensors: dict[str, Any]) -> list[Any]:
    """Those of ``tensors`` that the library takes for the adapters': trained ones, and frozen ones beside them."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return list(model.get_adapter_state_dict(state_dict=tensors).values())
    from peft import get_peft_model_state_dict

    return [
        tensor
        for adapter in model.peft_config
        for tensor in get_peft_model_state_dict(model, state_dict=tensors, adapter_name=adapter).values()
    ]

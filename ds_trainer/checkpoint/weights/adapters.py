"""Weights of a PEFT model: the adapter alone, as ``PeftModel.from_pretrained`` reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.engine.weights import full_shape, gathered
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

WEIGHTS_FILE = "adapter_model.safetensors"


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
    tensors = adapter_tensors(model)
    shapes = {name: full_shape(tensor) for name, tensor in tensors.items()}
    prompts = computed_prompts(model)
    with gathered([tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]):
        if distributed.rank() == 0:
            whole = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            write_adapters(model, whole, shapes, prompts, directory)
    distributed.barrier()


def write_adapters(
    model: Any,
    whole: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Sequence[int]],
    prompts: Mapping[str, torch.Tensor],
    directory: Path,
) -> None:
    """Write adapters by their library, and read them again.

    Args:
        model: the PEFT model; its own tensors are not looked at.
        whole: the adapters' tensors by their names in the model.
        shapes: what they must be.
        prompts: what :func:`computed_prompts` gave.
        directory: made if missing.

    Raises:
        ConfigError: a tensor has another shape, or what is on the disk afterwards is not what was written.
    """
    from safetensors.torch import load_file

    for name, shape in shapes.items():
        if tuple(whole[name].shape) != tuple(shape):
            raise ConfigError(f"{name} should be {list(shape)}, but what arrived is {list(whole[name].shape)}.")
    if prompts:
        model.get_prompt_embedding_to_save = prompts.__getitem__
    try:
        model.save_pretrained(str(directory), state_dict=dict(whole))
        written = list(_as_written(model, dict(whole), directory))
    finally:
        if prompts:
            del model.get_prompt_embedding_to_save
    for folder, wanted in written:
        path = folder / WEIGHTS_FILE
        found = load_file(path) if path.is_file() else {}
        if found.keys() != wanted.keys() or not all(torch.equal(found[n], t.cpu()) for n, t in wanted.items()):
            raise ConfigError(f"{path}: the adapters that are on the disk now are not those of the model.")


def computed_prompts(model: Any) -> dict[str, torch.Tensor]:
    """What is saved of each prompt adapter: a forward pass of its encoder, under ZeRO-3 of all ranks together."""
    configs = {} if getattr(model, "_hf_peft_config_loaded", False) else model.peft_config
    names = [name for name, config in configs.items() if config.is_prompt_learning]
    with torch.no_grad():
        return {name: model.get_prompt_embedding_to_save(name) for name in names}


def _as_written(
    model: Any, whole: dict[str, torch.Tensor], directory: Path
) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """What the library is to write into which folder."""
    if getattr(model, "_hf_peft_config_loaded", False):
        found = model.get_adapter_state_dict(state_dict=whole)
        yield directory, {f"base_model.model.{name}": tensor for name, tensor in found.items()}
        return
    from peft import get_peft_model_state_dict

    for name in model.peft_config:
        found = get_peft_model_state_dict(model, state_dict=whole, adapter_name=name)
        yield directory if name == "default" else directory / name, found


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """What is written of a PEFT model, by name: what its library takes for the adapters', and all that is trained."""
    tensors = model.state_dict(keep_vars=True)
    adapted = {id(tensor) for tensor in _adapter_tensors(model, tensors)}
    return {name: tensor for name, tensor in tensors.items() if id(tensor) in adapted or tensor.requires_grad}


def _adapter_tensors(model: Any, tensors: dict[str, Any]) -> list[Any]:
    """Those of ``tensors`` that the library takes for the adapters': trained ones, and frozen ones beside them."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return list(model.get_adapter_state_dict(state_dict=tensors).values())
    from peft import get_peft_model_state_dict

    return [
        tensor
        for adapter, config in model.peft_config.items()
        if not config.is_prompt_learning  # it would be computed by a forward pass: all ranks at once under ZeRO-3
        for tensor in get_peft_model_state_dict(model, state_dict=tensors, adapter_name=adapter).values()
    ]

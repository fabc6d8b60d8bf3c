"""Weights of a PEFT model: the adapter alone, as ``PeftModel.from_pretrained`` reads it."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.protocol.contents import Content, Held, Made
from ds_trainer.engine.weights import full_shape, gathered
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

WEIGHTS_FILE, CONFIGURATION_FILE = "adapter_model.safetensors", "adapter_config.json"


def saves_adapters(model: Any) -> bool:
    """Whether ``model`` is saved as its adapters: peft's wrapper, or a Hugging Face model with adapters put in.

    peft itself cannot save its mixed models (several kinds of adapters at once); all their weights are written.
    """
    peft = sys.modules.get("peft")
    return bool(peft and isinstance(model, peft.PeftModel)) or bool(getattr(model, "_hf_peft_config_loaded", False))


def base_names(model: Any) -> frozenset[str]:
    """Parameters of an adapter model that belong to its frozen base; none of any other model.

    A checkpoint of such a model does not hold them.
    """
    if not saves_adapters(model):
        return frozenset()
    adapted = {id(tensor) for tensor in adapter_tensors(model).values()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) not in adapted)


def adapter_contents(model: Any, writes: bool) -> list[Content]:
    """Each adapter's weights and configuration as files of a checkpoint; the bytes are made when they are written.

    Collective: the adapters, which are small, are gathered. None of a model that is saved whole.

    Args:
        model: any module.
        writes: this rank writes them; the others get no files.
    """
    if not saves_adapters(model):
        return []
    tensors = adapter_tensors(model)
    prompts = computed_prompts(model)
    with gathered([tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]):
        whole = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()} if writes else {}
    if not writes:
        return []
    with _said_beforehand(model, prompts):
        written = list(_as_written(model, whole, Path()))
    files: list[Content] = []
    for (folder, found), config in zip(written, _configurations(model), strict=True):
        files.append(Made((folder / WEIGHTS_FILE).as_posix(), partial(_weights_file, found)))
        files.append(Held((folder / CONFIGURATION_FILE).as_posix(), config))
    return files


def _weights_file(tensors: Mapping[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})


def _configurations(model: Any) -> Iterator[bytes]:
    """Each adapter's ``adapter_config.json``, in the order of :func:`_as_written`, as its library writes it."""
    put_in = getattr(model, "_hf_peft_config_loaded", False)
    for name, present in model.peft_config.items():
        if put_in and name not in _active(model):
            continue
        config, mapping = copy.copy(present), None
        if not put_in:
            inner = model.get_base_model()
            config.base_model_name_or_path = present.base_model_name_or_path or getattr(inner, "name_or_path", None)
            config.base_model_name_or_path = config.base_model_name_or_path or None
            config.inference_mode = True
            if config.task_type is None:
                kind = type(inner)
                mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder, auto_mapping_dict=mapping)
            yield (Path(folder) / CONFIGURATION_FILE).read_bytes()


def _active(model: Any) -> list[str]:
    using = model.active_adapters
    return list(using() if callable(using) else using)


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
    with _said_beforehand(model, prompts):
        model.save_pretrained(str(directory), state_dict=dict(whole))
        written = list(_as_written(model, dict(whole), directory))
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


@contextmanager
def _said_beforehand(model: Any, prompts: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, what is saved of prompt adapters is ``prompts``, not another forward pass."""
    if prompts:
        model.get_prompt_embedding_to_save = prompts.__getitem__
    try:
        yield
    finally:
        if prompts:
            del model.get_prompt_embedding_to_save


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


def written_names(model: Any) -> dict[str, tuple[Path, str]]:
    """Under which folder and key the library writes each of the tensors that it writes as they are, by their names.

    Raises:
        ConfigError: an adapter is computed when it is saved (prompts).
    """
    computed = [name for name, config in model.peft_config.items() if config.is_prompt_learning]
    if computed:
        raise ConfigError(
            f"The adapter {computed[0]} is made of prompts, of which peft saves what it computes, not what is trained: "
            "begin a new run with it."
        )
    tensors = adapter_tensors(model).items()
    places = {name: torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta") for name, tensor in tensors}
    names = {id(place): name for name, place in places.items()}
    return {
        names[id(tensor)]: (folder, key)
        for folder, found in _as_written(model, places, Path())
        for key, tensor in found.items()
        if id(tensor) in names
    }


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

"""Writes the adapters of a PEFT model in the format that ``PeftModel.from_pretrained`` reads."""

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

from ds_trainer.checkpoint.protocol.checkpoint_file import CheckpointFile, GeneratedFile, InMemoryFile
from ds_trainer.engine.weights import full_shape, gathered
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import own_files
from ds_trainer.utils.logging import get_logger

logger = get_logger(__name__)

WEIGHTS_FILE, CONFIGURATION_FILE = "adapter_model.safetensors", "adapter_config.json"


def saves_adapters(model: Any) -> bool:
    """Whether only the adapters of ``model`` are saved: a PEFT model, or a transformers model with injected adapters.

    peft cannot save its mixed models (several types of adapters at once); all weights of those are written.
    """
    peft = sys.modules.get("peft")
    return bool(peft and isinstance(model, peft.PeftModel)) or bool(getattr(model, "_hf_peft_config_loaded", False))


def base_parameter_names(model: Any) -> frozenset[str]:
    """Returns the names of the frozen base parameters of an adapter model; empty for any other model.

    A checkpoint of an adapter model does not contain them.
    """
    if not saves_adapters(model):
        return frozenset()
    adapted = {id(tensor) for tensor in adapter_tensors(model).values()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) not in adapted)


def adapter_files(model: Any, writes: bool) -> list[CheckpointFile]:
    """Returns each adapter's weights and configuration as checkpoint files, serialized when they are written.

    Collective: gathers the adapters, which are small. Empty for a model that is saved whole.

    Args:
        model: any module.
        writes: whether this rank writes the files; other ranks get an empty list.
    """
    if not saves_adapters(model):
        return []
    tensors = adapter_tensors(model)
    prompts = computed_prompts(model)
    with gathered([tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]):
        whole = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()} if writes else {}
    if not writes:
        return []
    with _precomputed_prompts(model, prompts):
        written = list(_saved_tensors(model, whole, Path()))
    warn_of_empty_adapters(model, written)
    files: list[CheckpointFile] = []
    for (folder, weights), config in zip(written, _configurations(model), strict=True):
        files.append(GeneratedFile((folder / WEIGHTS_FILE).as_posix(), partial(_serialized, weights)))
        files.append(InMemoryFile((folder / CONFIGURATION_FILE).as_posix(), config))
    return files


def _serialized(tensors: Mapping[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})


def _configurations(model: Any) -> Iterator[bytes]:
    """Yields each adapter's ``adapter_config.json`` as its library writes it, ordered as :func:`_saved_tensors`."""
    injected = getattr(model, "_hf_peft_config_loaded", False)
    for name, adapter in model.peft_config.items():
        if injected and name not in _active(model):
            continue
        config, mapping = copy.copy(adapter), None
        if not injected:
            inner = model.get_base_model()
            config.base_model_name_or_path = adapter.base_model_name_or_path or getattr(inner, "name_or_path", None)
            config.base_model_name_or_path = config.base_model_name_or_path or None
            config.inference_mode = True
            if config.task_type is None:
                kind = type(inner)
                mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder, auto_mapping_dict=mapping)
            yield (Path(folder) / CONFIGURATION_FILE).read_bytes()


def _active(model: Any) -> list[str]:
    names = model.active_adapters
    return list(names() if callable(names) else names)


def save_adapters(model: Any, directory: Path) -> None:
    """Write each adapter's weights and configuration to ``directory``. Collective: the main process writes.

    Under ZeRO-3 only the adapters are gathered, never the frozen model.
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
    """Write adapters with their library, then read them back and compare.

    Args:
        model: the PEFT model; its tensor elements are not accessed.
        whole: the full adapter tensors by their names in the model.
        shapes: their expected shapes.
        prompts: the result of :func:`computed_prompts`.
        directory: created if missing.

    Raises:
        ConfigError: a tensor has the wrong shape, or the files do not contain what was written.
    """
    from safetensors.torch import load_file

    for name, shape in shapes.items():
        if tuple(whole[name].shape) != tuple(shape):
            raise ConfigError(f"{name} has shape {list(whole[name].shape)} after gathering; expected {list(shape)}.")
    with _precomputed_prompts(model, prompts):
        written = list(_saved_tensors(model, dict(whole), directory))
        for folder, _ in written:
            own_files(folder)
            if (folder / WEIGHTS_FILE).is_symlink():
                (folder / WEIGHTS_FILE).unlink()
        model.save_pretrained(str(directory), state_dict=dict(whole))
    warn_of_empty_adapters(model, written)
    for folder, expected in written:
        path = folder / WEIGHTS_FILE
        tensors = load_file(path) if path.is_file() else {}
        if tensors.keys() != expected.keys() or not all(torch.equal(tensors[n], t.cpu()) for n, t in expected.items()):
            raise ConfigError(f"{path} does not contain the adapters that were written. Check the disk and save again.")


def warn_of_empty_adapters(model: Any, written: Sequence[tuple[Path, Mapping[str, torch.Tensor]]]) -> None:
    """Warn if the adapters ``written`` would change nothing where they are loaded, or lack what was trained.

    A factor that is zero makes its whole adapter zero: LoRA begins so.
    """
    trained = [name for name, tensor in model.named_parameters() if tensor.requires_grad]
    computed = any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values())
    kept = set(trained) if computed else adapter_file_keys(model).keys()
    lost = [name for name in trained if name not in kept]
    if lost and any(weights for _, weights in written):
        logger.warning(
            "The saved adapter does not hold %s, although it is trained: what it has learned is lost. Add its module "
            "to modules_to_save of the PEFT configuration, or freeze it.",
            listed(lost, most=3),
        )
    for folder, weights in written:
        where = (folder / WEIGHTS_FILE).as_posix()
        if not weights:
            logger.warning("%s holds no tensor: the model has no active adapter. Look at target_modules.", where)
            continue
        factors: dict[str, list[bool]] = {}
        for key, tensor in weights.items():
            if tensor.is_floating_point() and not tensor.is_meta:
                part = key.partition(".lora_")[0] if ".lora_" in key else "others"
                factors.setdefault(part, []).append(bool(tensor.any()))
        if factors and not any(all(filled) if part != "others" else any(filled) for part, filled in factors.items()):
            logger.warning(
                "The adapter in %s changes nothing: all of it, or one factor of each of its %d modules, is 0. It was "
                "not trained: look at learning_rate, at the gradients of lora_B, and at what is frozen.",
                where,
                len(factors),
            )


def computed_prompts(model: Any) -> dict[str, torch.Tensor]:
    """Returns what is saved of each prompt adapter: the output of its encoder. Under ZeRO-3 collective."""
    configs = {} if getattr(model, "_hf_peft_config_loaded", False) else model.peft_config
    names = [name for name, config in configs.items() if config.is_prompt_learning]
    with torch.no_grad():
        return {name: model.get_prompt_embedding_to_save(name) for name in names}


@contextmanager
def _precomputed_prompts(model: Any, prompts: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside the block, the model saves ``prompts`` instead of running another forward pass."""
    if prompts:
        model.get_prompt_embedding_to_save = prompts.__getitem__
    try:
        yield
    finally:
        if prompts:
            del model.get_prompt_embedding_to_save


def _saved_tensors(
    model: Any, whole: dict[str, torch.Tensor], directory: Path
) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """Yields the folder and the tensors that the library writes for each adapter."""
    if getattr(model, "_hf_peft_config_loaded", False):
        adapter = model.get_adapter_state_dict(state_dict=whole)
        yield directory, {f"base_model.model.{name}": tensor for name, tensor in adapter.items()}
        return
    from peft import get_peft_model_state_dict

    for name in model.peft_config:
        adapter = get_peft_model_state_dict(model, state_dict=whole, adapter_name=name)
        yield directory if name == "default" else directory / name, adapter


def adapter_file_keys(model: Any) -> dict[str, tuple[Path, str]]:
    """Returns the folder and the key under which the library writes each adapter tensor, by name in the model.

    Raises:
        ConfigError: a prompt adapter, whose saved tensors are computed.
    """
    computed = [name for name, config in model.peft_config.items() if config.is_prompt_learning]
    if computed:
        raise ConfigError(
            f"The adapter {computed[0]} is a prompt adapter: peft saves its computed embeddings, not the trained "
            "parameters, so it cannot be resumed. Start a new run with it."
        )
    tensors = adapter_tensors(model).items()
    stand_ins = {name: torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta") for name, tensor in tensors}
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    return {
        names[id(tensor)]: (folder, key)
        for folder, adapter in _saved_tensors(model, stand_ins, Path())
        for key, tensor in adapter.items()
        if id(tensor) in names
    }


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a PEFT model that are saved, by name: adapter tensors, and all trainable tensors."""
    tensors = model.state_dict(keep_vars=True)
    adapted = {id(tensor) for tensor in _adapter_tensors(model, tensors)}
    return {name: tensor for name, tensor in tensors.items() if id(tensor) in adapted or tensor.requires_grad}


def _adapter_tensors(model: Any, tensors: dict[str, Any]) -> list[Any]:
    """Returns the ``tensors`` that the library counts as adapter tensors, trainable and frozen."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return list(model.get_adapter_state_dict(state_dict=tensors).values())
    from peft import get_peft_model_state_dict

    return [
        tensor
        for adapter, config in model.peft_config.items()
        if not config.is_prompt_learning  # computed by a forward pass, which is collective under ZeRO-3
        for tensor in get_peft_model_state_dict(model, state_dict=tensors, adapter_name=adapter).values()
    ]

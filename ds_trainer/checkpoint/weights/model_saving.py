"""Saves a model for ``from_pretrained``: safetensors files of bounded size with an index, configuration, tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.weights.adapter_files import save_adapters, saves_adapters
from ds_trainer.checkpoint.weights.model_description import completed_config
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.sections import Section, entries_of, tensor_names
from ds_trainer.checkpoint.weights.weight_files import WeightSpec, plan_files, write_weight_files
from ds_trainer.engine.weights import full_shape, saved_tensors, whole_tensors
from ds_trainer.utils import distributed
from ds_trainer.utils.files import own_files, read_json, write_json

_GATHERED = 128 * 2**20  # bytes gathered at a time: large enough for an efficient collective


def save_weights(model: nn.Module, directory: Path, max_shard_bytes: int) -> None:
    """Write the weights of ``model`` to ``directory``. Collective: all ranks call it, the main process writes.

    Under ZeRO-3 and tensor parallelism a few parameters are gathered at a time, never more than one file's worth. Each
    is checked against its expected shape, and each file is read back. Weight files of a previous save that this one
    does not replace are removed, so that a directory never contains two models. Names are those of
    ``save_pretrained``. For a PEFT model only the adapters are written.

    Args:
        model: the module, whole or sharded by ZeRO-3; not the engine that wraps it.
        directory: created if missing.
        max_shard_bytes: maximum size of one file; a single tensor may exceed it.

    Raises:
        WeightFilesError: a gathered tensor does not match the model, or a file reads back differently than written.
    """
    if saves_adapters(model):
        save_adapters(model, directory)
        return
    tensors = saved_tensors(model)
    weights = [WeightSpec(name, full_shape(tensor), tensor.dtype) for name, tensor in tensors.items()]
    files = plan_files(sections_of(model, weights), max_shard_bytes)
    gathered = _gathered(tensors, [tensor_names(file) for file in files], min(max_shard_bytes, _GATHERED))
    if distributed.rank() == 0:
        write_sections(directory, files, gathered)
    else:
        deque(gathered, maxlen=0)  # take part in the collectives, keep nothing
    distributed.barrier()


def save_given_weights(
    model: nn.Module, state_dict: Mapping[str, torch.Tensor] | None, directory: Path, max_shard_bytes: int
) -> None:
    """Write weights to ``directory`` in this process alone, with the names of :func:`save_weights`.

    Args:
        model: the module whose weights these are.
        state_dict: full tensors by the names of ``model.state_dict()``; None: those of ``model``, complete here.
        directory: created if missing.
        max_shard_bytes: maximum size of one file.
    """
    if saves_adapters(model):
        model.save_pretrained(str(directory), state_dict=None if state_dict is None else dict(state_dict))  # type: ignore[operator]
        return
    tensors = saved_tensors(model)
    if state_dict is not None:
        tensors = {name: state_dict[name] for name in tensors}
    weights = [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    files = plan_files(sections_of(model, weights), max_shard_bytes)
    names = chain.from_iterable(tensor_names(file) for file in files)
    write_sections(directory, files, ((name, tensors[name].detach()) for name in names))


def _gathered(
    tensors: dict[str, torch.Tensor], files: list[list[str]], max_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    return chain.from_iterable(whole_tensors(tensors, names, max_bytes) for names in files)


def write_sections(
    directory: Path, files: Sequence[Sequence[Section]], tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Write weight files (:func:`write_weight_files`) from the tensors of a model.

    Args:
        directory: created if missing.
        files: the result of :func:`plan_files`.
        tensors: names and full tensors of the model, in the order of ``files``.
    """
    entries = chain.from_iterable(section.split(tensors) for file in files for section in file)
    write_weight_files(directory, [entries_of(file) for file in files], entries)


def save_config_and_processor(model: nn.Module, processing_class: Any, directory: Path) -> None:
    """Write configurations and tokenizer, which make ``directory`` loadable. For the main process.

    For a PEFT model, :func:`save_weights` writes the adapters' configuration instead of the model's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    own_files(directory)
    configs = (
        () if saves_adapters(model) else (getattr(model, "config", None), getattr(model, "generation_config", None))
    )
    for part in (*configs, processing_class):
        if part is not None and hasattr(part, "save_pretrained"):
            part.save_pretrained(str(directory))
    if configs:
        types = [tensor.dtype for tensor in saved_tensors(model).values()]
        complete_configuration(directory, type(model).__name__, types)


def complete_configuration(directory: Path, model_class: str, types: Sequence[torch.dtype]) -> None:
    """Record the class and dtype of the saved weights in ``config.json``, if it exists."""
    path = directory / "config.json"
    if path.is_file():
        write_json(path, completed_config(read_json(path), model_class, types))

"""Saves a model for ``from_pretrained``: safetensors files of bounded size with an index, configuration, tokenizer."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.protocol.shared_files import SharedFile
from ds_trainer.checkpoint.shards.element_types import TYPES
from ds_trainer.checkpoint.shards.model_plan import ModelPlan, TensorLocation
from ds_trainer.checkpoint.weights.adapter_files import save_adapters, saves_adapters
from ds_trainer.checkpoint.weights.model_description import completed_config
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.weight_files import (
    INDEX_FILE,
    Section,
    WeightSpec,
    entries_of,
    file_names,
    header,
    index_of,
    plan_files,
    tensor_names,
    write_weight_files,
)
from ds_trainer.engine.state.buffers import persistent_buffers
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
    most = min(max_shard_bytes, _GATHERED)
    gathered = chain.from_iterable(whole_tensors(tensors, tensor_names(file), most) for file in files)
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


class NoModelFiles(ValueError):
    """The saved weights of a model cannot be assembled from its state shards."""


def plan_model_files(model: nn.Module, max_bytes: int, frozen: Collection[str] = ()) -> ModelPlan:
    """Plan the weight files of ``model``, of which this rank may hold only a part.

    Args:
        model: the module, whole or sharded; not the engine that wraps it.
        max_bytes: maximum size of one file; a single tensor may exceed it.
        frozen: frozen parameters: they get separate files, which later checkpoints link to.

    Raises:
        NoModelFiles: a tensor that ``save_model`` writes is neither a parameter nor a buffer of the model, or has a
            dtype that safetensors does not support.
    """
    names_by_id = {id(buffer): name for name, buffer in reversed(list(persistent_buffers(model)))}
    names_by_id.update({id(parameter): name for name, parameter in model.named_parameters()})
    tensors = saved_tensors(model)
    problems = [name for name, tensor in tensors.items() if id(tensor) not in names_by_id or tensor.dtype not in TYPES]
    if problems:
        raise NoModelFiles(
            f"{', '.join(problems[:3])}{' ...' if len(problems) > 3 else ''}: not a parameter or buffer of a dtype "
            "that safetensors supports"
        )
    sections = sections_of(model, [WeightSpec(n, full_shape(t), t.dtype) for n, t in tensors.items()])
    state_names = {name: names_by_id[id(tensor)] for name, tensor in tensors.items()}
    frozen_sections, trained = list[Section](), list[Section]()
    for section in sections:
        is_frozen = {state_names[weight.name] in frozen for weight in section.tensors}
        # A file contains either frozen or trained tensors.
        parts = [section] if len(is_frozen) == 1 else [Section.of(weight) for weight in section.tensors]
        for part in parts:
            (frozen_sections if state_names[part.tensors[0].name] in frozen else trained).append(part)
    files = plan_files(trained, max_bytes) if trained or not frozen_sections else []
    first, files = len(files), files + (plan_files(frozen_sections, max_bytes) if frozen_sections else [])
    names, listed = file_names(len(files)), [entries_of(file) for file in files]
    shared, stored = [], {}
    for name, sections_of_file, entries in zip(names, files, listed, strict=True):
        header_bytes = header(entries)
        offset = len(header_bytes)
        for section in sections_of_file:
            for weight in section.tensors:
                stored[state_names[weight.name]] = TensorLocation(name, offset, weight.dtype)
                offset += weight.nbytes
        shared.append(SharedFile(name, offset, header_bytes))
    text = json.dumps(index_of(names, listed), indent=2, ensure_ascii=False) + "\n" if len(names) > 1 else None
    return ModelPlan(
        shared,
        None if text is None else InMemoryFile(INDEX_FILE, text.encode()),
        stored,
        max_bytes,
        frozenset(names[first:]),
    )

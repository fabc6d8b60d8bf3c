"""Weights as safetensors, in files of a bounded size with an index: what ``from_pretrained`` reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.weights.adapters import save_adapters, saves_adapters
from ds_trainer.checkpoint.weights.description import completed
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.sections import Section, entries_of, tensor_names
from ds_trainer.checkpoint.weights.weight_files import Weight, plan_files, write_weight_files
from ds_trainer.engine.weights import full_shape, saved_tensors, whole_tensors
from ds_trainer.utils import distributed
from ds_trainer.utils.files import read_json, write_json

_GATHERED = 128 * 2**20  # bytes that are whole at a time: enough for a collective to be worth it


def save_weights(model: nn.Module, directory: Path, max_shard_bytes: int) -> None:
    """Write the weights of ``model`` to ``directory``. Collective: all ranks call it, the main process writes.

    Under ZeRO-3 and tensor parallelism a few parameters are gathered at a time, never more than a file's worth. Each
    is checked against the shape that the model says, and each file is read again. Weight files of an earlier save that
    this one does not replace are removed, so that a reader never finds two models in one directory. Names are those of
    ``save_pretrained``. Of a PEFT model the adapters are written, and nothing else.

    Args:
        model: the module, whole or sharded by ZeRO-3; not the engine around it.
        directory: made if missing.
        max_shard_bytes: largest size of one file; a single tensor of the model may exceed it.

    Raises:
        WeightFilesError: what was gathered is not the model, or a file reads back otherwise than it was written.
    """
    if saves_adapters(model):
        save_adapters(model, directory)
        return
    tensors = saved_tensors(model)
    weights = [Weight(name, full_shape(tensor), tensor.dtype) for name, tensor in tensors.items()]
    files = plan_files(sections_of(model, weights), max_shard_bytes)
    arriving = _gathered(tensors, [tensor_names(file) for file in files], min(max_shard_bytes, _GATHERED))
    if distributed.rank() == 0:
        write_sections(directory, files, arriving)
    else:
        deque(arriving, maxlen=0)  # keeps none of them
    distributed.barrier()


def _gathered(
    tensors: dict[str, torch.Tensor], files: list[list[str]], max_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    return chain.from_iterable(whole_tensors(tensors, names, max_bytes) for names in files)


def write_sections(
    directory: Path, files: Sequence[Sequence[Section]], tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Write files of weights (:func:`write_weight_files`) out of the tensors of a model.

    Args:
        directory: made if missing.
        files: what :func:`plan_files` gave.
        tensors: of the model, in the order of ``files``.
    """
    cut = chain.from_iterable(section.cut(tensors) for file in files for section in file)
    write_weight_files(directory, [entries_of(file) for file in files], cut)


def save_pretrained_parts(model: nn.Module, processing_class: Any, directory: Path) -> None:
    """Everything beside the weights that makes ``directory`` loadable: configurations and tokenizer. Main process.

    A PEFT model's configuration is the adapters', written with their weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    own = () if saves_adapters(model) else (getattr(model, "config", None), getattr(model, "generation_config", None))
    for part in (*own, processing_class):
        if part is not None and hasattr(part, "save_pretrained"):
            part.save_pretrained(str(directory))
    if own:
        types = [tensor.dtype for tensor in saved_tensors(model).values()]
        complete_configuration(directory, type(model).__name__, types)


def complete_configuration(directory: Path, model_class: str, types: Sequence[torch.dtype]) -> None:
    """Say in ``config.json``, where there is one, of which class and type the weights beside it are."""
    path = directory / "config.json"
    if path.is_file():
        write_json(path, completed(read_json(path), model_class, types))

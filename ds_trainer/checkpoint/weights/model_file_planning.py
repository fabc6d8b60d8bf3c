"""Plans the weight files of the model in a checkpoint, from the names, shapes and dtypes of the model."""

from __future__ import annotations

import json
from collections.abc import Collection

from torch import nn

from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.protocol.shared_files import SharedFile
from ds_trainer.checkpoint.shards.element_types import TYPES
from ds_trainer.checkpoint.shards.model_plan import ModelPlan, TensorLocation
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.sections import Section, entries_of
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, WeightSpec, file_names, header, index_of, plan_files
from ds_trainer.engine.state.buffers import persistent_buffers
from ds_trainer.engine.weights import full_shape, saved_tensors


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

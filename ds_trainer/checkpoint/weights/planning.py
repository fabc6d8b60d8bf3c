"""Plans the weight files of the model in a checkpoint, from the model alone: names, shapes and types."""

from __future__ import annotations

import json
from collections.abc import Collection

from torch import nn

from ds_trainer.checkpoint.pieces.element_types import TYPES
from ds_trainer.checkpoint.pieces.model_plan import ModelPlan, StoredTensor
from ds_trainer.checkpoint.protocol.contents import Held
from ds_trainer.checkpoint.protocol.shared_files import SharedFile
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.sections import Section, entries_of
from ds_trainer.checkpoint.weights.weight_files import INDEX_FILE, Weight, file_names, header, index_of, plan_files
from ds_trainer.engine.state.pieces import persistent_buffers
from ds_trainer.engine.weights import full_shape, saved_tensors


class NoModelFiles(ValueError):
    """The weights of a model do not follow from its pieces."""


def plan_model(model: nn.Module, max_bytes: int, frozen: Collection[str] = ()) -> ModelPlan:
    """Plan the files of ``model``, of which this rank may hold a part only.

    Args:
        model: the module, whole or sharded; not the engine around it.
        max_bytes: largest size of one file; a single tensor of the model may exceed it.
        frozen: parameters that stay as they are: they get files of their own, which later checkpoints link to.

    Raises:
        NoModelFiles: a tensor that ``save_model`` writes is neither a parameter nor a buffer of the model, or has a
            type that safetensors cannot hold.
    """
    kept = {id(buffer): name for name, buffer in reversed(list(persistent_buffers(model)))}
    kept.update({id(parameter): name for name, parameter in model.named_parameters()})
    tensors = saved_tensors(model)
    problems = [name for name, tensor in tensors.items() if id(tensor) not in kept or tensor.dtype not in TYPES]
    if problems:
        raise NoModelFiles(
            f"{', '.join(problems[:3])}{' ...' if len(problems) > 3 else ''}: no parameter or buffer of a type that "
            "safetensors can hold"
        )
    sections = sections_of(model, [Weight(n, full_shape(t), t.dtype) for n, t in tensors.items()])
    own = {name: kept[id(tensor)] for name, tensor in tensors.items()}
    staying, trained = list[Section](), list[Section]()
    for section in sections:
        stays = {own[weight.name] in frozen for weight in section.tensors}
        alone = [section] if len(stays) == 1 else [Section.of(weight) for weight in section.tensors]
        for one in alone:  # no file has both
            (staying if own[one.tensors[0].name] in frozen else trained).append(one)
    files = plan_files(trained, max_bytes) if trained or not staying else []
    first, files = len(files), files + (plan_files(staying, max_bytes) if staying else [])
    names, listed = file_names(len(files)), [entries_of(file) for file in files]
    shared, stored = [], {}
    for name, of_file, entries in zip(names, files, listed, strict=True):
        head = header(entries)
        offset = len(head)
        for section in of_file:
            for weight in section.tensors:
                stored[own[weight.name]] = StoredTensor(name, offset, weight.dtype)
                offset += weight.nbytes
        shared.append(SharedFile(name, offset, head))
    text = json.dumps(index_of(names, listed), indent=2, ensure_ascii=False) + "\n" if len(names) > 1 else None
    return ModelPlan(
        shared, None if text is None else Held(INDEX_FILE, text.encode()), stored, max_bytes, frozenset(names[first:])
    )

"""Describes the model in a checkpoint, so that its weights can be exported without the model's code.

``model.json`` lists each tensor with its shape, dtype, name in weight files, and the name of its state shards; the
model's class; and its adapters. It is stored next to the files that ``save_pretrained`` writes for configuration and
tokenizer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import torch
from torch import nn

from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.shards.element_types import TYPES, type_of
from ds_trainer.checkpoint.weights.adapter_files import adapter_tensors, saves_adapters
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.weight_files import Section, WeightSpec
from ds_trainer.engine.state.buffers import persistent_buffers
from ds_trainer.engine.weights import full_shape, saved_tensors
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import parse_json

DESCRIPTION_FILE = "model.json"
CONFIGURATION_FILES = ("config.json", "generation_config.json")
_FORMAT = 2
_READABLE = (1, 2)  # format 1 had no sections

# A run does not change its tokenizer, and a large one takes a second to serialize: the last files are cached.
_processing_files: list[tuple[Any, dict[str, bytes]]] = []


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor of the model that is part of its weight files.

    Attributes:
        name: its name in the weight file.
        shape, dtype: full shape, and the dtype of computation by its safetensors name.
        kept_as: the name of its state shards; None if the checkpoint does not contain it.
        buffer: it is a buffer, not a parameter.
        adapter: it is written if only adapters are saved.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kept_as: str | None
    buffer: bool = False
    adapter: bool = False

    def weight(self, dtype: torch.dtype | None = None) -> WeightSpec:
        """Returns the specification for writing; floating-point tensors get ``dtype``, if given."""
        stored = type_of(self.dtype)
        return WeightSpec(
            self.name, tuple(self.shape), stored if dtype is None or not stored.is_floating_point else dtype
        )


@dataclass(frozen=True)
class ModelDescription:
    """A model without its weights.

    Attributes:
        model_class: name of its class; for a PEFT model, of the wrapped model.
        from_transformers: whether the class is part of transformers.
        tensors: tensors in the order of the weight file.
        files: names of the configuration and tokenizer files, as in an export.
        name_or_path: where transformers loaded the model from; adapters name it as their base model.
        adapters: peft configurations by adapter name; empty without adapters.
        active: names of the active adapters.
        wrapped: whether peft's class wraps the model; False if transformers injected the adapters.
        sections: for tensors that weight files list differently: their names; names and shapes in the files.
    """

    model_class: str
    from_transformers: bool
    tensors: list[DescribedTensor]
    files: list[str]
    name_or_path: str = ""
    adapters: dict[str, Any] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)
    wrapped: bool = False
    sections: list[tuple[list[str], list[tuple[str, list[int]]]]] = field(default_factory=list)

    def file_sections(self, dtype: torch.dtype | None = None) -> list[Section]:
        """Returns the sections of the weight files; floating-point tensors get ``dtype``, if given."""
        weights = {tensor.name: tensor.weight(dtype) for tensor in self.tensors}
        sections = {name: Section.of(weight) for name, weight in weights.items()}
        for names, entries in self.sections:
            tensors = tuple(weights[name] for name in names)
            listed = tuple(WeightSpec(name, tuple(shape), tensors[0].dtype) for name, shape in entries)
            for name in names[1:]:
                del sections[name]
            sections[names[0]] = Section(tensors, listed)
        return list(sections.values())

    @classmethod
    def read(cls, checkpoint: Path) -> ModelDescription:
        """Read what :func:`description_files` wrote.

        Raises:
            ConfigError: the checkpoint has no description.
        """
        path = checkpoint / DESCRIPTION_FILE
        try:
            values = parse_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{checkpoint} does not describe its model ({DESCRIPTION_FILE} is missing): it is not a checkpoint, or "
                "another program wrote it. Convert other formats with 'ds-trainer checkpoint convert'; to export a "
                "converted checkpoint, pass a directory with the model's config.json as --model."
            ) from None
        if values.pop("format") not in _READABLE:
            raise ConfigError(f"{path} was written by a newer version of ds_trainer. Use that version.")
        for name in values["files"]:  # they become paths in the directory of an export
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ConfigError(
                    f"{path} lists the file {name!r}, which would lie outside the export directory. Do not use this "
                    "checkpoint."
                )
        tensors = [DescribedTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in values.pop("tensors")]
        return cls(tensors=tensors, **values)


def description_files(model: nn.Module, processing_class: Any) -> Iterator[InMemoryFile]:
    """Yields the files that the main process adds to a checkpoint: description, configuration and tokenizer."""
    files: dict[str, bytes] = {}
    for name in ("config", "generation_config"):
        files.update(_files_of(getattr(model, name, None)))
    if not _processing_files or _processing_files[0][0] is not processing_class:
        _processing_files[:] = [(processing_class, _files_of(processing_class))]
    files.update(_processing_files[0][1])
    if "config.json" in files:
        types = [tensor.dtype for tensor in saved_tensors(model).values()]
        values = completed_config(parse_json(files["config.json"]), type(model).__name__, types)
        files["config.json"] = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
    description = describe(model, sorted(files))
    tensors = [asdict(tensor) for tensor in description.tensors]
    text = json.dumps({"format": _FORMAT, **vars(description), "tensors": tensors})
    yield InMemoryFile(DESCRIPTION_FILE, text.encode())
    for name, data in files.items():
        yield InMemoryFile(name, data)


def stored_file(checkpoint: Path, name: str) -> Path:
    """Returns the path of a file in :attr:`ModelDescription.files`; earlier checkpoints had no folders."""
    path = checkpoint / name
    return path if path.is_file() else checkpoint / quote(name, safe=" ")


def completed_config(values: dict[str, Any], model_class: str, types: Sequence[torch.dtype]) -> dict[str, Any]:
    """Returns the values of ``config.json`` completed with the class and dtype of the saved weights."""
    dtype = next((dtype for dtype in types if dtype.is_floating_point), None)
    if dtype is None:
        return values
    config = {**values, "architectures": [model_class], "dtype": str(dtype).removeprefix("torch.")}
    return dict(sorted(config.items()))


def describe(model: Any, files: list[str]) -> ModelDescription:
    """Describes ``model``, of which this rank may hold only a part."""
    adapted = {id(tensor) for tensor in adapter_tensors(model).values()} if saves_adapters(model) else set()
    kept = {id(buffer): name for name, buffer in reversed(list(persistent_buffers(model)))}
    kept.update({id(parameter): name for name, parameter in model.named_parameters()})
    tensors = [
        DescribedTensor(
            name,
            full_shape(tensor),
            TYPES[tensor.dtype],
            kept.get(id(tensor)),
            buffer=not isinstance(tensor, nn.Parameter),
            adapter=id(tensor) in adapted,
        )
        for name, tensor in saved_tensors(model).items()
    ]
    inner = model
    adapters: dict[str, Any] = {}
    active: list[str] = []
    wrapped = bool(adapted) and not getattr(model, "_hf_peft_config_loaded", False)
    if adapted:
        inner = model.get_base_model() if wrapped else model
        adapters = {
            name: parse_json(_files_of(config)["adapter_config.json"]) for name, config in model.peft_config.items()
        }
        names = model.active_adapters
        active = list(names() if callable(names) else names)
    kind = type(inner)
    known = kind.__module__.startswith("transformers.")
    name_or_path = str(getattr(inner, "name_or_path", None) or "")
    sections = [
        ([weight.name for weight in section.tensors], [(entry.name, list(entry.shape)) for entry in section.entries])
        for section in sections_of(model, [tensor.weight() for tensor in tensors])
        if section.tensors != section.entries
    ]
    return ModelDescription(
        model_class=kind.__name__,
        from_transformers=known,
        tensors=tensors,
        files=files,
        name_or_path=name_or_path,
        adapters=adapters,
        active=active,
        wrapped=wrapped,
        sections=sections,
    )


def _files_of(part: Any) -> dict[str, bytes]:
    """Returns the files that ``part.save_pretrained`` writes, by relative name."""
    if part is None or not hasattr(part, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

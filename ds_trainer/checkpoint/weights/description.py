"""What a checkpoint says of the model itself, so that weights can be taken out of it without the model.

``model.json``: each tensor of the model with shape and type, under which name its pieces are kept, and what a weight
file calls it; the class of the model; its adapters. Beside it the files that ``save_pretrained`` writes for
configuration and tokenizer.
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

from ds_trainer.checkpoint.pieces.element_types import TYPES, type_of
from ds_trainer.checkpoint.protocol.contents import Held
from ds_trainer.checkpoint.weights.adapters import adapter_tensors, saves_adapters
from ds_trainer.checkpoint.weights.saved_names import sections_of
from ds_trainer.checkpoint.weights.sections import Section
from ds_trainer.checkpoint.weights.weight_files import Weight
from ds_trainer.engine.state.pieces import persistent_buffers
from ds_trainer.engine.weights import full_shape, saved_tensors
from ds_trainer.utils.errors import ConfigError

DESCRIPTION_FILE = "model.json"
CONFIGURATION_FILES = ("config.json", "generation_config.json")
_FORMAT = 2
_READABLE = (1, 2)  # the first one had no sections

# A run does not change its tokenizer, and a large one takes a second to write: the last one's files are kept.
_processing_files: list[tuple[Any, dict[str, bytes]]] = []


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor of the model that is in its weight files.

    Attributes:
        name: in the weight file.
        shape, dtype: of the whole tensor, as the model computes with it; the type by its name in safetensors.
        kept_as: the name of its pieces; None where the checkpoint does not hold it.
        buffer: it is no parameter.
        adapter: it is written where adapters are saved alone.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kept_as: str | None
    buffer: bool = False
    adapter: bool = False

    def weight(self, dtype: torch.dtype | None = None) -> Weight:
        """As it is written; numbers with a fraction as ``dtype``, where one is given."""
        own = type_of(self.dtype)
        return Weight(self.name, tuple(self.shape), own if dtype is None or not own.is_floating_point else dtype)


@dataclass(frozen=True)
class ModelDescription:
    """A model without its numbers.

    Attributes:
        model_class: the name of its class (of what peft wraps).
        from_transformers: the class is one of transformers'.
        tensors: in the order of the weight file, as the model has them.
        name_or_path: where transformers had loaded it from; adapters name it as the model that they belong to.
        files: names of the files for configuration and tokenizer, as they are called in an export.
        adapters: peft's configurations by name; empty without adapters.
        active: names of the adapters that are in use.
        wrapped: peft's own class is around the model; False where transformers put the adapters in.
        sections: of tensors that weight files list in another way: their names; names and shapes in the files.
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

    def sections_as(self, dtype: torch.dtype | None = None) -> list[Section]:
        """What weight files hold; numbers with a fraction as ``dtype``, where one is given."""
        weights = {tensor.name: tensor.weight(dtype) for tensor in self.tensors}
        found = {name: Section.of(weight) for name, weight in weights.items()}
        for names, entries in self.sections:
            tensors = tuple(weights[name] for name in names)
            listed = tuple(Weight(name, tuple(shape), tensors[0].dtype) for name, shape in entries)
            for name in names[1:]:
                del found[name]
            found[names[0]] = Section(tensors, listed)
        return list(found.values())

    @classmethod
    def read(cls, checkpoint: Path) -> ModelDescription:
        """What :func:`description_contents` wrote.

        Raises:
            ConfigError: the checkpoint has none.
        """
        path = checkpoint / DESCRIPTION_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{checkpoint} does not say what model it is of ({DESCRIPTION_FILE} is missing in it): it is no "
                "checkpoint, or one that was made by another program. 'ds-trainer checkpoint convert' reads those of "
                "others; to export one that was converted, name a directory with the model's config.json by --model."
            ) from None
        if values.pop("format") not in _READABLE:
            raise ConfigError(f"{path} was written by a newer version of ds_trainer; use that one.")
        for name in values["files"]:  # they become paths in the directory of an export
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ConfigError(f"{path} names the file {name!r}, which would be outside of an export.")
        tensors = [DescribedTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in values.pop("tensors")]
        return cls(tensors=tensors, **values)


def description_contents(model: nn.Module, processing_class: Any) -> Iterator[Held]:
    """What the main process adds to a checkpoint: the description, configuration and tokenizer."""
    files: dict[str, bytes] = {}
    for name in ("config", "generation_config"):
        files.update(_files_of(getattr(model, name, None)))
    if not _processing_files or _processing_files[0][0] is not processing_class:
        _processing_files[:] = [(processing_class, _files_of(processing_class))]
    files.update(_processing_files[0][1])
    if "config.json" in files:
        types = [tensor.dtype for tensor in saved_tensors(model).values()]
        values = completed(json.loads(files["config.json"]), type(model).__name__, types)
        files["config.json"] = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
    description = describe(model, sorted(files))
    tensors = [asdict(tensor) for tensor in description.tensors]
    text = json.dumps({"format": _FORMAT, **vars(description), "tensors": tensors})
    yield Held(DESCRIPTION_FILE, text.encode())
    for name, data in files.items():
        yield Held(name, data)


def held_file(checkpoint: Path, name: str) -> Path:
    """Where a file of :attr:`ModelDescription.files` is; earlier checkpoints had no folders."""
    path = checkpoint / name
    return path if path.is_file() else checkpoint / quote(name, safe=" ")


def completed(values: dict[str, Any], model_class: str, types: Sequence[torch.dtype]) -> dict[str, Any]:
    """What ``config.json`` says, and of which class and type the weights beside it are."""
    dtype = next((dtype for dtype in types if dtype.is_floating_point), None)
    if dtype is None:
        return values
    said = {**values, "architectures": [model_class], "dtype": str(dtype).removeprefix("torch.")}
    return dict(sorted(said.items()))


def describe(model: Any, files: list[str]) -> ModelDescription:
    """A description of ``model``, of which this rank may hold a part only."""
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
        adapters = {name: _configuration_of(config) for name, config in model.peft_config.items()}
        using = model.active_adapters
        active = list(using() if callable(using) else using)
    kind = type(inner)
    known = kind.__module__.startswith("transformers.")
    origin = str(getattr(inner, "name_or_path", None) or "")
    sections = [
        ([weight.name for weight in section.tensors], [(entry.name, list(entry.shape)) for entry in section.entries])
        for section in sections_of(model, [tensor.weight() for tensor in tensors])
        if section.tensors != section.entries
    ]
    return ModelDescription(kind.__name__, known, tensors, files, origin, adapters, active, wrapped, sections)


def _configuration_of(config: Any) -> Any:
    """An adapter's configuration, in peft's own form."""
    return json.loads(_files_of(config)["adapter_config.json"])


def _files_of(part: Any) -> dict[str, bytes]:
    """What ``part.save_pretrained`` writes, by relative name."""
    if part is None or not hasattr(part, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        part.save_pretrained(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}

"""``FileWeights``: a weight source that reads the weight files of a model directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_trainer.checkpoint.loading.name_mapping import NameMapping, WeightConversion, map_names
from ds_trainer.checkpoint.loading.range_reader import BUFFER_BYTES, RangeReader, check_conversion
from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor, stored_tensors
from ds_trainer.checkpoint.weights.element_tracer import TracedTensor
from ds_trainer.checkpoint.weights.saved_names import is_pretrained_model
from ds_trainer.checkpoint.weights.strided_views import StridedView, boxes_of
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from ds_trainer.utils.errors import ConfigError, did_you_mean

_COMPARED = 2**20  # elements compared at a time when the files store a tied weight twice


class ShapeMismatch(NamedTuple):
    """A tensor whose shape in the files differs from its shape in the model."""

    name: str
    in_files: tuple[int, ...]
    in_model: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} is {list(self.in_files)} in the files and {list(self.in_model)} in the model"


class FileWeights:
    """Reads arbitrary elements of a model's parameters and persistent buffers from its weight files.

    Created by :func:`open_weights`. Only headers are read before the first :meth:`fill`.

    Attributes:
        directory: the directory of the files.
        missing: names of the model that the files lack. A tied weight counts once, under its first name, and only if
            the files have it under none of its names.
        unexpected: keys in the files that match no tensor of the model and that it does not declare as ignorable.
        mismatched: tensors whose shapes differ. :meth:`fill` rejects them.
        file_bytes: total bytes of all tensors in the files.
        key_mapping: the argument of :func:`open_weights`.
    """

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        stored: Mapping[str, StoredTensor],
        mapping: NameMapping,
        reader: RangeReader,
        key_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.key_mapping = key_mapping
        self.directory = directory
        self._stored = stored
        self._tensors = mapping.tensors
        self._reader = reader
        self._shapes = {
            name: full_shape(tensor)
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state")
        }
        self._tied = _tied_names(model)
        self._computed: tuple[WeightConversion, dict[str, torch.Tensor]] | None = None
        self.file_bytes = sum(tensor.nbytes for tensor in stored.values())
        self.mismatched = [
            ShapeMismatch(name, shape, self._shapes[name])
            for name in self._shapes
            if name in self._tensors and (shape := self._shape(name)) != self._shapes[name]
        ]
        missing = {self._tied.get(name, [name])[0]: None for name in self._shapes if not self.has(name)}
        self.missing, self.unexpected = _without_ignored(model, list(missing), mapping.unexpected)

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank has read from the file system so far."""
        return self._reader.bytes_read

    @property
    def seconds(self) -> float:
        """Seconds that this rank has spent reading so far."""
        return self._reader.seconds

    @property
    def names(self) -> list[str]:
        """Names of the model's tensors that are in the files; a tied weight appears under each of its names."""
        return [name for name in self._shapes if self.has(name)]

    def has(self, name: str) -> bool:
        """Whether the files have this tensor, under this name or another name of the same tied weight."""
        return bool(self._present(name))

    def nearest(self, name: str) -> str:
        """Returns ``" Did you mean 'x'?"`` for a missing name or unexpected key; empty if no name is similar."""
        candidates = self._shapes if name in self.unexpected else [*self.unexpected, *self._stored]
        return did_you_mean(name, candidates)

    def fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Read ``len(shard_slice)`` elements of a tensor into ``target``, cast to its dtype.

        Args:
            name: a tensor for which :meth:`has` is true.
            shard_slice: the elements to read.
            target: flat, contiguous, ``[len(shard_slice)]``, on any device.

        Raises:
            ConfigError: the files lack the tensor, store it with another shape or with a dtype that cannot be
                converted, or store a tied weight twice with different elements.
        """
        present = self._present(name)
        if not present:
            raise ConfigError(f"{self.directory} has no {name}.{self.nearest(name)}")
        stored_name = present[0]
        if self._shape(stored_name) != shard_slice.shape:
            raise ConfigError(
                f"{name} has shape {list(shard_slice.shape)} in the model but {list(self._shape(stored_name))} in "
                f"{self.directory}. The directory holds the weights of a different model."
            )
        self._fill(stored_name, shard_slice, target)
        if len(present) > 1:
            self._check_copies(present, shard_slice, target)

    def close(self) -> None:
        """Close files and free buffers; a later :meth:`fill` reopens them."""
        self._computed = None
        self._reader.close()

    def _present(self, name: str) -> list[str]:
        """Names under which the files store this tensor; the first one is read."""
        return [alias for alias in self._tied.get(name, [name]) if alias in self._tensors]

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        return tensor.shapes[name] if isinstance(tensor, WeightConversion) else tensor.shape

    def _fill(self, name: str, shard_slice: ShardSlice, target: torch.Tensor) -> None:
        tensor = self._tensors[name]
        if isinstance(tensor, WeightConversion):
            for keys in tensor.sources.values():
                for key in keys:
                    check_conversion(self._stored[key], target.dtype)
            # The results of a conversion; the last results are cached for further slices.
            if self._computed is None or self._computed[0] is not tensor:
                self._computed = None  # free them before the next ones are computed
                self._computed = tensor, tensor.compute(self._read_whole)
            copy_common(target, shard_slice, self._computed[1][name].reshape(-1), ShardSlice.whole(shard_slice.shape))
            return
        self._reader.read(_stored_ranges(tensor, shard_slice, self._stored), target)

    def _read_whole(self, key: str) -> torch.Tensor:
        stored = self._stored[key]
        whole = torch.empty(stored.numel, dtype=stored.dtype)
        tensor = TracedTensor.of(key, stored.shape, stored.strides)
        self._reader.read(_stored_ranges(tensor, ShardSlice.whole(stored.shape), self._stored), whole)
        return whole.view(stored.shape)

    def _check_copies(self, present: list[str], shard_slice: ShardSlice, target: torch.Tensor) -> None:
        """Raise if the files store a tied weight several times with different elements."""
        locations = {self._location(name) for name in present}
        if len(locations) == 1 and None not in locations:
            return  # the same bytes in the file
        for other in present[1:]:
            for start in range(shard_slice.start, shard_slice.stop, _COMPARED):
                part = shard_slice.run(start, min(shard_slice.stop, start + _COMPARED))
                values = torch.empty(len(part), dtype=target.dtype)
                self._fill(other, part, values)
                loaded = target[start - shard_slice.start : part.stop - shard_slice.start]
                if not torch.equal(loaded.cpu().view(torch.uint8), values.view(torch.uint8)):
                    raise ConfigError(
                        f"The model ties {present[0]} and {other}, but {self.directory} stores different elements for "
                        "them. Set tie_word_embeddings=False in its config.json to load them as two weights."
                    )

    def _location(self, name: str) -> tuple[Any, ...] | None:
        """Returns the location of a tensor that is stored without conversion; otherwise None."""
        tensor = self._tensors[name]
        if isinstance(tensor, WeightConversion) or len(tensor.parts) != 1:
            return None
        source, box = tensor.parts[0]
        stored = self._stored[source]
        return stored.path, stored.offset, box


def _stored_ranges(
    tensor: TracedTensor, shard_slice: ShardSlice, stored: Mapping[str, StoredTensor]
) -> list[tuple[StoredTensor, StridedView, StridedView]]:
    """Returns the elements of stored tensors that make up a slice, in file order."""
    ranges = []
    for box in boxes_of(shard_slice):
        for source, part in tensor.parts:
            common = part.common(box)
            if common is not None:
                ranges.append((stored[source], *common))
    return sorted(ranges, key=lambda entry: (entry[0].path, entry[0].offset, entry[1].offset))


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Maps each name of a tied weight to all of its names, in the model's order."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    first_name = {name: name for name in names}
    firsts: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name[name] = firsts.setdefault(id(parameter), name)
    # In a model built on meta, tied names may no longer share one parameter.
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target in first_name and source in first_name and first_name[target] != first_name[source]:
            old, new = first_name[target], first_name[source]
            first_name = {name: new if first == old else first for name, first in first_name.items()}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(first_name[name], []).append(name)
    return {name: group for group in groups.values() if len(group) > 1 for name in group}


def _without_ignored(
    model: nn.Module, missing: Iterable[str], unexpected: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Removes the missing names and unexpected keys that the model declares as ignorable."""
    if not is_pretrained_model(model):
        return list(missing), list(unexpected)
    loading_info: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected.values()))
    model._adjust_missing_and_unexpected_keys(loading_info)  # type: ignore[operator]
    return (
        [name for name in missing if name in loading_info.missing_keys],
        [key for key, name in unexpected.items() if name in loading_info.unexpected_keys],
    )


def open_weights(
    directory: str | Path,
    model: nn.Module,
    key_mapping: Mapping[str, str] | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    stored: Mapping[str, StoredTensor] | None = None,
) -> FileWeights:
    """Opens the weight files in ``directory`` as a weight source for ``model``. Reads only their headers.

    Names are mapped as in transformers' ``from_pretrained``: renamed keys, files of a base model for a model with a
    head and vice versa, and experts stacked into one tensor.

    Args:
        directory: a model or checkpoint directory that contains ``model.safetensors``, ``pytorch_model.bin``, or the
            index of several files of either format.
        model: any ``nn.Module``, with parameters on the meta device or sharded; their elements are not accessed. For a
            module that is not a transformers model, names are used unchanged.
        key_mapping: patterns of keys and their replacements, as in ``from_pretrained``.
        buffer_bytes: host memory for reading. In addition, a parameter whose conversion does more than move elements
            is held whole in host memory, one at a time.
        stored: the result of :func:`~ds_trainer.checkpoint.loading.stored_tensors.stored_tensors`, if already known.

    Raises:
        ConfigError: there are no weight files, or they are damaged.
    """
    directory = Path(directory)
    stored = stored_tensors(directory) if stored is None else stored
    reader = RangeReader(buffer_bytes)
    return FileWeights(directory, model, stored, map_names(model, stored, key_mapping), reader, key_mapping)

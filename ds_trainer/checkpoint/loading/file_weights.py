"""``FileWeights``: the weight files of a model directory as a weight source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_trainer.checkpoint.loading.name_mapping import Computed, NameMapping, map_names
from ds_trainer.checkpoint.loading.range_reader import BUFFER_BYTES, RangeReader, check_conversion
from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor, stored_tensors
from ds_trainer.checkpoint.weights.geometry import View, boxes_of
from ds_trainer.checkpoint.weights.saved_names import is_pretrained_model
from ds_trainer.checkpoint.weights.symbolic import SymbolicTensor
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.places import Place, copy_common
from ds_trainer.utils.errors import ConfigError, did_you_mean

_COMPARED = 2**20  # elements of a tied weight that are compared at a time, where the files have it twice


class Mismatch(NamedTuple):
    """A tensor that has another shape in the files than in the model."""

    name: str
    in_files: tuple[int, ...]
    in_model: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} is {list(self.in_files)} in the files and {list(self.in_model)} in the model"


class FileWeights:
    """Reads any elements of the parameters and persistent buffers of a model out of its weight files.

    :func:`open_weights` makes it. Nothing but headers is read before the first :meth:`fill`.

    Attributes:
        directory: of the files.
        missing: names of the model that the files do not have. A tied weight counts once, under its first name, and
            only where the files have it under none of its names.
        unexpected: keys of the files that the model has no place for and does not declare as known.
        mismatched: tensors whose shapes differ. :meth:`fill` refuses them.
        file_bytes: bytes of all tensors of the files.
        key_mapping: what :func:`open_weights` was given.
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
        self._groups = _tied_names(model)
        self._computed: tuple[Computed, dict[str, torch.Tensor]] | None = None
        self.file_bytes = sum(tensor.nbytes for tensor in stored.values())
        self.mismatched = [
            Mismatch(name, shape, self._shapes[name])
            for name in self._shapes
            if name in self._tensors and (shape := self._shape(name)) != self._shapes[name]
        ]
        missing = {self._groups.get(name, [name])[0]: None for name in self._shapes if not self.has(name)}
        self.missing, self.unexpected = _without_ignored(model, list(missing), mapping.unexpected)

    @property
    def bytes_read(self) -> int:
        """Bytes that were asked of the file system so far, on this rank."""
        return self._reader.bytes_read

    @property
    def seconds(self) -> float:
        """Time spent reading so far, on this rank."""
        return self._reader.seconds

    @property
    def names(self) -> list[str]:
        """Names of the model's tensors that the files have; a tied weight under each of its names."""
        return [name for name in self._shapes if self.has(name)]

    def has(self, name: str) -> bool:
        """Whether the files have this tensor, under this name or another one of the same tied weight."""
        return bool(self._present(name))

    def nearest(self, name: str) -> str:
        """``" Did you mean 'x'?"`` for a name that is missing or a key that is unexpected; empty if nothing is near."""
        others = self._shapes if name in self.unexpected else [*self.unexpected, *self._stored]
        return did_you_mean(name, others)

    def fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        """Read ``len(place)`` elements of a tensor into ``target``, converted to its type.

        Args:
            name: of a tensor that it :meth:`has`.
            place: which elements.
            target: flat, contiguous, ``[len(place)]``, on any device.

        Raises:
            ConfigError: the files do not have it, or with another shape, or of a type that cannot be converted; or they
                have a tied weight twice, with different elements.
        """
        present = self._present(name)
        if not present:
            raise ConfigError(f"{self.directory} has no {name}.{self.nearest(name)}")
        found = present[0]
        if self._shape(found) != place.shape:
            raise ConfigError(
                f"{name} has the shape {list(place.shape)} here, and {list(self._shape(found))} in {self.directory}: "
                "it holds the weights of another model."
            )
        self._fill(found, place, target)
        if len(present) > 1:
            self._compare(present, place, target)

    def close(self) -> None:
        """Let go of open files and buffers; a later :meth:`fill` takes new ones."""
        self._computed = None
        self._reader.close()

    def _present(self, name: str) -> list[str]:
        """Names of the same tensor that the files have, the one that counts first."""
        return [one for one in self._groups.get(name, [name]) if one in self._tensors]

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        return tensor.shapes[name] if isinstance(tensor, Computed) else tuple(tensor.shape)

    def _fill(self, name: str, place: Place, target: torch.Tensor) -> None:
        tensor = self._tensors[name]
        if isinstance(tensor, Computed):
            for keys in tensor.sources.values():
                for key in keys:
                    check_conversion(self._stored[key], target.dtype)
            copy_common(target, place, self._compute(tensor)[name].reshape(-1), Place.whole(place.shape))
            return
        self._reader.read(_wanted(tensor, place, self._stored), target)

    def _compute(self, tensor: Computed) -> dict[str, torch.Tensor]:
        """The results of a conversion, of which the last ones are kept: more ranges of them are asked for."""
        if self._computed is None or self._computed[0] is not tensor:
            self._computed = None  # before the next ones are made
            self._computed = tensor, tensor.compute(self._read_whole)
        return self._computed[1]

    def _read_whole(self, key: str) -> torch.Tensor:
        stored = self._stored[key]
        whole = torch.empty(stored.numel, dtype=stored.dtype)
        tensor = SymbolicTensor.of(key, stored.shape, stored.strides)
        self._reader.read(_wanted(tensor, Place.whole(stored.shape), self._stored), whole)
        return whole.view(stored.shape)

    def _compare(self, present: list[str], place: Place, target: torch.Tensor) -> None:
        """Refuse a tied weight that the files have several times, with different elements."""
        places = {self._location(name) for name in present}
        if len(places) == 1 and None not in places:
            return  # the same bytes of the file
        for other in present[1:]:
            for start in range(place.start, place.stop, _COMPARED):
                part = place.run(start, min(place.stop, start + _COMPARED))
                values = torch.empty(len(part), dtype=target.dtype)
                self._fill(other, part, values)
                read = target[start - place.start : part.stop - place.start]
                if not torch.equal(read.cpu().view(torch.uint8), values.view(torch.uint8)):
                    raise ConfigError(
                        f"The model ties {present[0]} and {other}, and {self.directory} has both with different "
                        "elements. Set tie_word_embeddings=False in its config.json, so that they are two weights."
                    )

    def _location(self, name: str) -> tuple[Any, ...] | None:
        """Where the elements of a tensor lie that is stored as it is; None for a conversion."""
        tensor = self._tensors[name]
        if isinstance(tensor, Computed) or len(tensor.parts) != 1:
            return None
        source, box = tensor.parts[0]
        stored = self._stored[source]
        return stored.path, stored.offset, box


def _wanted(
    tensor: SymbolicTensor, place: Place, stored: Mapping[str, StoredTensor]
) -> list[tuple[StoredTensor, View, View]]:
    """Which elements of which stored tensors a place consists of, in the order of the files."""
    found = []
    for box in boxes_of(place):
        for source, part in tensor.parts:
            common = part.common(box)
            if common is not None:
                found.append((stored[source], *common))
    return sorted(found, key=lambda one: (one[0].path, one[0].offset, one[1].offset))


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """For each name of a tied weight all its names, in the model's order."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    leader = {name: name for name in names}
    firsts: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        leader[name] = firsts.setdefault(id(parameter), name)
    # A model that was built on meta may have lost what its tied names share.
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target in leader and source in leader and leader[target] != leader[source]:
            old, new = leader[target], leader[source]
            leader = {name: new if first == old else first for name, first in leader.items()}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(leader[name], []).append(name)
    return {name: group for group in groups.values() if len(group) > 1 for name in group}


def _without_ignored(
    model: nn.Module, missing: Iterable[str], unexpected: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Missing names and unexpected keys without those that the model declares as known."""
    if not is_pretrained_model(model):
        return list(missing), list(unexpected)
    said: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected.values()))
    model._adjust_missing_and_unexpected_keys(said)  # type: ignore[operator]
    return (
        [name for name in missing if name in said.missing_keys],
        [key for key, name in unexpected.items() if name in said.unexpected_keys],
    )


def open_weights(
    directory: str | Path,
    model: nn.Module,
    key_mapping: Mapping[str, str] | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    stored: Mapping[str, StoredTensor] | None = None,
) -> FileWeights:
    """The weight files of ``directory`` as a weight source for ``model``. Reads their headers.

    Names are mapped as ``from_pretrained`` of transformers maps them: renamed keys, a base model's files for a model
    with a head and the other way round, experts that are stacked into one tensor.

    Args:
        directory: with ``model.safetensors``, ``pytorch_model.bin`` or the index of several of either kind; of a model
            or of a checkpoint.
        model: with its parameters on the meta device, or sharded (their elements are not looked at). Any
            ``nn.Module``; names of one that is not transformers' are taken as they are.
        key_mapping: patterns of keys and their replacements, as ``from_pretrained`` takes it.
        buffer_bytes: host memory for reading. A parameter that transformers computes in another way than by moving
            elements is whole in host memory in addition, one at a time.
        stored: what :func:`~ds_trainer.checkpoint.loading.stored_tensors.stored_tensors` found there, if that is known.

    Raises:
        ConfigError: there are no weight files, or they are damaged.
    """
    directory = Path(directory)
    stored = stored_tensors(directory) if stored is None else stored
    reader = RangeReader(buffer_bytes)
    return FileWeights(directory, model, stored, map_names(model, stored, key_mapping), reader, key_mapping)

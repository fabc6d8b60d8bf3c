"""Reads full tensors from the state shards of a checkpoint, one at a time: no process group, no model, no GPU.

Files are read in chunks of a few megabytes instead of being memory-mapped, so resident memory is one tensor and a
buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ds_trainer.checkpoint.export.meta_model import base_meta_model
from ds_trainer.checkpoint.loading.file_weights import FileWeights, open_weights
from ds_trainer.checkpoint.shards.element_types import type_of
from ds_trainer.checkpoint.shards.shard_file import shard_key
from ds_trainer.checkpoint.weights.base_digest import BaseDigest
from ds_trainer.checkpoint.weights.model_description import DescribedTensor, ModelDescription
from ds_trainer.checkpoint.weights.weight_files import read_header_and_metadata
from ds_trainer.engine.state.state_shards import BUFFER, MASTER, WEIGHT
from ds_trainer.parallel.shard_slices import ShardSlice, copy_common
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import parse_json

_CHUNK = 32 * 2**20  # bytes of a shard that are read at a time


class WholeTensors(Protocol):
    """What reads full tensors of a described model, one at a time.

    Attributes:
        checkpoint: a directory with the model's configuration, and the place that messages name.
    """

    checkpoint: Path

    def read(self, tensor: DescribedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the full tensor, converted to ``dtype``."""


class _StoredShard(NamedTuple):
    path: Path
    slice: ShardSlice
    dtype: torch.dtype
    offset: int  # bytes from the beginning of the file


class CheckpointWeights:
    """The weights in a checkpoint.

    Args:
        checkpoint: the directory of the checkpoint.
        base: for adapters, the directory of their base model; default: where it was loaded from.

    Raises:
        ConfigError: there are no shard files, or one is damaged.
    """

    def __init__(self, checkpoint: Path, base: Path | None = None) -> None:
        self.checkpoint = checkpoint
        digest = BaseDigest.read(checkpoint)
        self._base = None if digest is None else BaseWeights(checkpoint, digest, base)
        self._shards: dict[str, list[_StoredShard]] = {}
        paths = sorted(checkpoint.glob("rank_*.safetensors"))
        if not paths:
            raise ConfigError(
                f"{checkpoint} contains no shard files (rank_*.safetensors). Pass a checkpoint-N directory that a "
                "training run wrote."
            )
        for path in paths:
            header, metadata = read_header_and_metadata(path)
            in_model = parse_json(metadata.get("in_model", "{}"))
            for key, listed in parse_json(metadata["places"]).items():
                shard_slice = ShardSlice.from_json(listed)
                if key in in_model:  # with the other ranks' shards: that file has the full tensor
                    name, offset, dtype = in_model[key]
                    whole = ShardSlice.whole(shard_slice.shape)
                    self._shards[key] = [_StoredShard(checkpoint / name, whole, type_of(dtype), offset)]
                    continue
                entry = header[key]
                stored = _StoredShard(path, shard_slice, type_of(entry["dtype"]), entry["data_offsets"][0])
                self._shards.setdefault(key, []).append(stored)

    def bytes_by_kind(self) -> dict[str, int]:
        """Returns the bytes of each kind of state shard: weights, master weights, optimizer states."""
        sizes: dict[str, int] = {}
        for key, shards in sorted(self._shards.items()):
            kind = key.rpartition("/")[2]
            sizes[kind] = sizes.get(kind, 0) + sum(len(shard.slice) * shard.dtype.itemsize for shard in shards)
        return sizes

    def problems(self, tensors: Sequence[DescribedTensor]) -> list[str]:
        """Checks that the shards of ``tensors`` are complete, without reading them; returns one message per problem."""
        problems = []
        for tensor in tensors:
            if tensor.kept_as is None:
                problems.append(f"{tensor.name} is computed by the model on every save; checkpoints do not contain it.")
                continue
            if self._in_base(tensor):
                continue  # checked when it is read
            numel = tensor.weight().numel
            shards = self._shards_of(tensor)
            lengths = [len(shard.slice) for shard in shards]
            available = max(lengths, default=0) if tensor.buffer else sum(lengths)
            shapes = {shard.slice.shape for shard in shards}
            if available != numel:
                problems.append(f"{tensor.name}: {self.checkpoint} contains {available} of {numel} elements.")
            elif any(_numel(shape) != numel for shape in shapes):
                problems.append(
                    f"{tensor.name} has shape {list(tensor.shape)}, but its shards belong to {sorted(shapes)}."
                )
        return problems

    def read(self, tensor: DescribedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a full tensor, cast to ``dtype``.

        Raises:
            ConfigError: the files do not contain all of its elements.
        """
        if self._base is not None and tensor.kept_as is not None and self._in_base(tensor):
            return self._base.read(tensor.kept_as, dtype)
        stored = self._shards_of(tensor)
        numel = _numel(tensor.shape)
        target = torch.empty(numel, dtype=dtype)
        copied = 0
        for shard in stored[:1] if tensor.buffer else stored:
            whole = ShardSlice.whole(shard.slice.shape)
            for shard_slice, elements in _chunks(shard):
                copied += copy_common(target, whole, elements, shard_slice)
        if copied != numel:
            raise ConfigError(
                f"{self.checkpoint}: its files lack {numel - copied} of {numel} elements of {tensor.name}. The file of "
                "a rank is missing; with save_on_each_node=True, combine the directories of all nodes."
            )
        return target.view(tensor.shape)

    def _in_base(self, tensor: DescribedTensor) -> bool:
        return bool(self._base and tensor.kept_as and self._base.has(tensor.kept_as) and not self._shards_of(tensor))

    def _shards_of(self, tensor: DescribedTensor) -> list[_StoredShard]:
        if tensor.kept_as is None:
            return []
        kinds = (BUFFER,) if tensor.buffer else (MASTER, WEIGHT)
        return next((shards for kind in kinds if (shards := self._shards.get(shard_key(tensor.kept_as, kind)))), [])


def _numel(shape: Sequence[int]) -> int:
    return len(ShardSlice.whole(shape))


def _chunks(shard: _StoredShard) -> Iterator[tuple[ShardSlice, torch.Tensor]]:
    """Yields the elements of a shard in chunks, each with its slice of the tensor."""
    size = shard.dtype.itemsize
    step = max(1, _CHUNK // size)
    with shard.path.open("rb", buffering=0) as stream:
        stream.seek(shard.offset)
        for start in range(0, len(shard.slice), step):
            stop = min(start + step, len(shard.slice))
            elements = torch.empty(stop - start, dtype=shard.dtype)
            rest = elements.view(torch.uint8).numpy().data
            while rest:
                read = stream.readinto(rest)
                if not read:
                    raise OSError(f"{shard.path} ended early: it was truncated while it was read.")
                rest = rest[read:]
            yield shard.slice.run(shard.slice.start + start, shard.slice.start + stop), elements


# Reads the base model of a checkpoint's adapters from its original files, as the checkpoint does not contain it.


_PEFT_WRAPPERS = ("base_layer", "original_module")  # peft's attributes for wrapped modules
_PEFT_PREFIX = "base_model.model."


class BaseWeights:
    """Reads full tensors of the base model, one at a time, and checks them against the checkpoint's digest.

    Args:
        checkpoint: a checkpoint with adapters and the digest of their base.
        digest: the digest of the base.
        directory: the directory of the base; default: where it was loaded from.
    """

    def __init__(self, checkpoint: Path, digest: BaseDigest, directory: Path | None) -> None:
        self._checkpoint = checkpoint
        self._digest = digest
        self._directory = directory
        self._weights: FileWeights | None = None

    def has(self, name: str) -> bool:
        """Whether the tensor belongs to the base."""
        return name in self._digest.tensors

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a full tensor.

        Raises:
            ConfigError: the base is not available, lacks the tensor, or is a different model.
        """
        if self._weights is None:
            model = base_meta_model(self._checkpoint, ModelDescription.read(self._checkpoint))
            if self._directory is None:
                self._directory = _downloaded(self._digest.model)
            if self._directory is None or not any(self._directory.glob("*.safetensors")):
                raise ConfigError(
                    f"{self._checkpoint} contains adapters without their base model, and that model "
                    f"({self._directory or self._digest.model or 'unnamed'}) is not available as safetensors. Pass its "
                    "directory as --model."
                )
            self._weights = open_weights(self._directory, model)
        weights = self._weights
        key = name.removeprefix(_PEFT_PREFIX)
        key = ".".join(part for part in key.split(".") if part not in _PEFT_WRAPPERS)
        if not weights.has(key):
            raise ConfigError(f"{self._directory} has no {key}: it is not the base model of the adapters.")
        shape = self._digest.shape(name)
        flat = torch.empty(math.prod(shape), dtype=self._digest.dtype(name))
        weights.fill(key, ShardSlice.whole(shape), flat)
        tensor = flat.view(shape)
        self._digest.check_tensor(name, tensor, Path(str(self._directory)))
        return tensor.to(dtype)


def _downloaded(name: str) -> Path | None:
    """Returns the directory ``name``, or the downloaded files of that Hub repository; None if neither exists."""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError):
        return None

"""Identifies the base model of adapters, which their checkpoints do not contain.

``base.json`` records where the base was loaded from and, for each of its tensors, dtype, shape and a digest of sampled
elements. The sampled positions depend only on a tensor's name and size, and each rank contributes the samples that it
holds, so the digest is the same in every layout.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.shards.element_types import TYPES, type_of
from ds_trainer.checkpoint.weights.adapter_files import adapter_tensors, base_parameter_names, saves_adapters
from ds_trainer.engine.state.buffers import persistent_buffers
from ds_trainer.engine.state.flat_partitions import UnknownState
from ds_trainer.engine.state.state_shards import BUFFER, StateShard, frozen_shards
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.shard_slices import ShardSlice
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import parse_json

BASE_FILE = "base.json"
_SAMPLES = 256  # elements per tensor
_UNSET = torch.iinfo(torch.int64).min
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_NAMES = 5  # tensors in a message


@dataclass(frozen=True)
class BaseDigest:
    """Identifies the base model of adapters.

    Attributes:
        model: the directory or name that the base was loaded from; empty if unknown.
        tensors: dtype, shape and digest of each frozen parameter and buffer; the digest is empty if unknown.
    """

    model: str
    tensors: Mapping[str, tuple[str, tuple[int, ...], str]]

    @classmethod
    def of(cls, engine: TrainingEngine) -> BaseDigest | None:
        """Computes the digest of the base of the adapter model in ``engine``. Collective: one all-reduce.

        Returns None if checkpoints contain the whole model: it has no adapters, or DeepSpeed writes the engine state.
        """
        model: Any = engine.deepspeed.module
        if not saves_adapters(model):
            return None
        try:
            return cls._of(engine, model)
        except UnknownState:
            return None

    @classmethod
    def _of(cls, engine: TrainingEngine, model: Any) -> BaseDigest:
        names = base_parameter_names(model)
        adapted = {id(tensor) for tensor in adapter_tensors(model).values()}
        buffers = {name: tensor for name, tensor in persistent_buffers(model) if id(tensor) not in adapted}
        tensors = {**{n: p for n, p in model.named_parameters() if n in names}, **buffers}
        rows = {name: row for row, name in enumerate(tensors)}
        samples = torch.full((len(rows), _SAMPLES), _UNSET, dtype=torch.int64)
        for shard in _local_shards(engine, names, buffers):
            sample, position = shard.slice.locate(_sampled(shard.name, shard.slice.shape))
            if len(sample) and not shard.tensor.is_meta:  # an engine on meta (a dry run) has no values
                samples[rows[shard.name], sample] = _as_integers(shard.tensor, position)
        merged = distributed.largest(samples)
        return cls(
            str(getattr(model, "name_or_path", None) or ""),
            {n: (TYPES[t.dtype], full_shape(t), _digest(merged[rows[n]])) for n, t in tensors.items()},
        )

    @classmethod
    def read(cls, checkpoint: Path) -> BaseDigest | None:
        """Reads the digest in ``checkpoint``; None if the checkpoint contains the whole model."""
        path = checkpoint / BASE_FILE
        if not path.is_file():
            return None
        values = parse_json(path.read_text(encoding="utf-8"))
        return cls(values["model"], {name: (t, tuple(s), d) for name, (t, s, d) in values["tensors"].items()})

    def restricted_to_frozen(self, model: nn.Module) -> BaseDigest:
        """Returns the digest without parameters of ``model`` that have become trainable since."""
        frozen, parameters = base_parameter_names(model), {name for name, _ in model.named_parameters()}
        tensors = {name: entry for name, entry in self.tensors.items() if name in frozen or name not in parameters}
        return BaseDigest(self.model, tensors)

    def to_file(self) -> InMemoryFile:
        """Returns the file that :meth:`read` reads."""
        return InMemoryFile(BASE_FILE, (json.dumps({"model": self.model, "tensors": self.tensors}) + "\n").encode())

    def check(self, current: BaseDigest | None, checkpoint: Path) -> None:
        """Compare this base, which ``checkpoint`` belongs to, with the base of the run.

        Raises:
            ConfigError: they differ; the message names the tensors.
        """
        if current is None:
            raise ConfigError(
                f"{checkpoint} contains adapters without their base model ({self.model or 'unnamed'}), but the model "
                "of this run has no adapters. Create the PEFT model that was trained."
            )
        known = {name: entry for name, entry in self.tensors.items() if entry[2]}
        different = [name for name, entry in known.items() if current.tensors.get(name) != entry]
        if not different:
            return
        differences = [self._difference(name, current) for name in different]
        raise ConfigError(
            f"{checkpoint} contains adapters of the base model {self.model or '(unnamed)'}, but the base model of this "
            f"run ({current.model or 'unnamed'}) is different: {len(different)} of {len(self.tensors)} frozen tensors "
            f"differ: {listed(differences, _MAX_NAMES, '; ')}. Load the model that the adapters were trained on."
        )

    def check_tensor(self, name: str, tensor: torch.Tensor, source: Path) -> None:
        """Compare a whole tensor that was read from ``source``.

        Raises:
            ConfigError: it differs.
        """
        if not self.tensors.get(name, ("", (), ""))[2]:
            return
        samples = torch.full((_SAMPLES,), _UNSET, dtype=torch.int64)
        indices = _sampled(name, tuple(tensor.shape))
        samples[: len(indices)] = _as_integers(tensor.reshape(-1), indices)
        if self.tensors[name] != (TYPES[tensor.dtype], tuple(tensor.shape), _digest(samples)):
            raise ConfigError(
                f"{source}: {name} differs from the model that the adapters were trained on. Pass that model."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the recorded shape of a tensor."""
        return self.tensors[name][1]

    def dtype(self, name: str) -> torch.dtype:
        """Returns the recorded dtype of a tensor."""
        return type_of(self.tensors[name][0])

    def _difference(self, name: str, current: BaseDigest) -> str:
        dtype, shape, _ = self.tensors[name]
        if name not in current.tensors:
            return f"{name} is not a frozen tensor of this run"
        current_dtype, current_shape, _ = current.tensors[name]
        if (dtype, shape) != (current_dtype, current_shape):
            return (
                f"{name} is {dtype} {list(shape)} in the checkpoint, {current_dtype} {list(current_shape)} in this run"
            )
        return f"{name} has different values"


def _local_shards(
    engine: TrainingEngine, names: Collection[str], buffers: Mapping[str, torch.Tensor]
) -> Iterator[StateShard]:
    """Yields this rank's shards of the base; buffers, which every rank holds whole, come from the main process."""
    yield from frozen_shards(engine, names)
    if distributed.rank() == 0:
        for name, buffer in buffers.items():
            yield StateShard(name, BUFFER, ShardSlice.whole(buffer.shape), buffer.detach().reshape(-1))


def _sampled(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the indices of the sampled elements: all of a small tensor, one from each interval of a large one."""
    numel = len(ShardSlice.whole(shape))
    if numel <= _SAMPLES:
        return torch.arange(numel)
    index = torch.arange(_SAMPLES)
    first, last = index * numel // _SAMPLES, (index + 1) * numel // _SAMPLES
    # Not equally spaced: those could all lie in one column of a matrix.
    shift = (index + zlib.crc32(name.encode())) * 2_654_435_761 % 2**32
    return first + shift % (last - first)


def _as_integers(flat: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    elements = flat.detach()[indices.to(flat.device)]
    return elements.view(_INTEGERS[elements.element_size()]).to("cpu", torch.int64)


def _digest(samples: torch.Tensor) -> str:
    return hashlib.blake2b(samples.numpy().tobytes(), digest_size=8).hexdigest()

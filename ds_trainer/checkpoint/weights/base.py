"""The model that adapters belong to: not in their checkpoints, so that what identifies it is.

``base.json``: where it was loaded from, and of each of its tensors type, shape and a digest of sampled elements. The
samples follow from a tensor's name and size, and whoever holds one tells it: the digest is the same in every layout.
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

from ds_trainer.checkpoint.pieces.element_types import TYPES, type_of
from ds_trainer.checkpoint.protocol.contents import Held
from ds_trainer.checkpoint.weights.adapters import adapter_tensors, base_names, saves_adapters
from ds_trainer.engine.state.pieces import BUFFER, Piece, frozen_pieces, persistent_buffers
from ds_trainer.engine.state.units import UnknownState
from ds_trainer.engine.training_engine import TrainingEngine
from ds_trainer.engine.weights import full_shape
from ds_trainer.parallel.places import Place
from ds_trainer.utils import distributed
from ds_trainer.utils.errors import ConfigError

BASE_FILE = "base.json"
_SAMPLES = 256  # elements of a tensor
_NOBODY = torch.iinfo(torch.int64).min
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMED = 5  # tensors in a message


@dataclass(frozen=True)
class BaseDigest:
    """What identifies the model that adapters belong to.

    Attributes:
        model: the directory or name that it was loaded from; empty where it does not say.
        tensors: of each frozen parameter and buffer: type, shape, digest (empty where it is not known).
    """

    model: str
    tensors: Mapping[str, tuple[str, tuple[int, ...], str]]

    @classmethod
    def of(cls, engine: TrainingEngine) -> BaseDigest | None:
        """Of the base of the adapter model in ``engine``, as it is now. Collective: one message.

        None where checkpoints hold the whole model: it has no adapters, or DeepSpeed itself writes the engine's state.
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
        names = base_names(model)
        adapted = {id(tensor) for tensor in adapter_tensors(model).values()}
        buffers = {name: tensor for name, tensor in persistent_buffers(model) if id(tensor) not in adapted}
        tensors = {**{n: p for n, p in model.named_parameters() if n in names}, **buffers}
        rows = {name: row for row, name in enumerate(tensors)}
        samples = torch.full((len(rows), _SAMPLES), _NOBODY, dtype=torch.int64)
        for piece in _held(engine, names, buffers):
            which, where = piece.place.locate(_sampled(piece.name, piece.place.shape))
            if len(which):
                samples[rows[piece.name], which] = _as_integers(piece.tensor, where)
        agreed = distributed.largest(samples)
        return cls(
            str(getattr(model, "name_or_path", None) or ""),
            {n: (TYPES[t.dtype], full_shape(t), _digest(agreed[rows[n]])) for n, t in tensors.items()},
        )

    @classmethod
    def read(cls, checkpoint: Path) -> BaseDigest | None:
        """What the checkpoint says of the base; None where it is whole in the checkpoint, or of no adapter model."""
        path = checkpoint / BASE_FILE
        if not path.is_file():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(values["model"], {name: (t, tuple(s), d) for name, (t, s, d) in values["tensors"].items()})

    def while_frozen(self, model: nn.Module) -> BaseDigest:
        """Without parameters of ``model`` that have been made trainable since."""
        frozen, parameters = base_names(model), {name for name, _ in model.named_parameters()}
        kept = {name: one for name, one in self.tensors.items() if name in frozen or name not in parameters}
        return BaseDigest(self.model, kept)

    def content(self) -> Held:
        """The file that :meth:`read` reads."""
        return Held(BASE_FILE, (json.dumps({"model": self.model, "tensors": self.tensors}) + "\n").encode())

    def check(self, present: BaseDigest | None, checkpoint: Path) -> None:
        """Compare this base, of ``checkpoint``, with that of the run.

        Raises:
            ConfigError: it is another one; the message names what differs.
        """
        if present is None:
            raise ConfigError(
                f"{checkpoint} holds adapters, not the model that they belong to ({self.model or 'unnamed'}), and the "
                "model here has no adapters. Make the same PEFT model that was trained."
            )
        differ = [name for name, one in self.tensors.items() if one[2] and present.tensors.get(name) != one]
        if not differ:
            return
        said = "; ".join(self._difference(name, present) for name in differ[:_NAMED])
        more = f"; and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
        raise ConfigError(
            f"{checkpoint} holds adapters, not the model that they belong to, and that one ({self.model or 'unnamed'}) "
            f"is not the model here ({present.model or 'unnamed'}): {len(differ)} of {len(self.tensors)} frozen "
            f"tensors differ: {said}{more}. Load the model that the adapters were trained on."
        )

    def check_tensor(self, name: str, tensor: torch.Tensor, origin: Path) -> None:
        """Compare a whole tensor that was read from ``origin``.

        Raises:
            ConfigError: it is another one.
        """
        if not self.tensors.get(name, ("", (), ""))[2]:
            return
        samples = torch.full((_SAMPLES,), _NOBODY, dtype=torch.int64)
        indices = _sampled(name, tuple(tensor.shape))
        samples[: len(indices)] = _as_integers(tensor.reshape(-1), indices)
        if self.tensors[name] != (TYPES[tensor.dtype], tuple(tensor.shape), _digest(samples)):
            raise ConfigError(f"{origin}: {name} is not that of the model that the adapters were trained on.")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that a tensor had."""
        return self.tensors[name][1]

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor had."""
        return type_of(self.tensors[name][0])

    def _difference(self, name: str, present: BaseDigest) -> str:
        dtype, shape, _ = self.tensors[name]
        if name not in present.tensors:
            return f"{name} is not a frozen tensor here"
        found, sizes, _ = present.tensors[name]
        if (dtype, shape) != (found, sizes):
            return f"{name} is {dtype} {list(shape)} in the checkpoint, {found} {list(sizes)} here"
        return f"{name} has other numbers"


def _held(engine: TrainingEngine, names: Collection[str], buffers: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """This rank's part of the base; of buffers, which each rank has whole, the main process speaks."""
    yield from frozen_pieces(engine, names)
    if distributed.rank() == 0:
        for name, buffer in buffers.items():
            yield Piece(name, BUFFER, Place.whole(buffer.shape), buffer.detach().reshape(-1))


def _sampled(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Indices of the elements of a tensor that are looked at: all of a small one, one of each stretch of a large."""
    numel = len(Place.whole(shape))
    if numel <= _SAMPLES:
        return torch.arange(numel)
    index = torch.arange(_SAMPLES)
    first, last = index * numel // _SAMPLES, (index + 1) * numel // _SAMPLES
    # Not at equal distances: these might be one column of a matrix.
    shift = (index + zlib.crc32(name.encode())) * 2_654_435_761 % 2**32
    return first + shift % (last - first)


def _as_integers(flat: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    found = flat.detach()[where.to(flat.device)]
    return found.view(_INTEGERS[found.element_size()]).to("cpu", torch.int64)


def _digest(samples: torch.Tensor) -> str:
    return hashlib.blake2b(samples.numpy().tobytes(), digest_size=8).hexdigest()

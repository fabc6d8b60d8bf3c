"""Checkpoints of others: recognised by their files, and read without running what they hold."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_trainer.utils.errors import ConfigError

_POINTERS = ("latest", "latest_universal")
_MODEL_FILES = "*_model_states.pt"
_PLAIN_TRAINER = ("optimizer.pt", "training_args.bin")  # the second alone: of weights only, or of FSDP


class Kind(Enum):
    """Who wrote a checkpoint."""

    PLAIN = "DeepSpeed's engine.save_checkpoint"
    UNIVERSAL = "DeepSpeed's ds_to_universal"
    TRANSFORMERS = "transformers.Trainer with DeepSpeed"
    PLAIN_TRAINER = "transformers.Trainer"


class Foreign(NamedTuple):
    """A checkpoint that this package did not write.

    Attributes:
        path: as it was named.
        kind: who wrote it.
        files: the directory with DeepSpeed's files: ``path``, or ``global_step<N>`` in it. Without DeepSpeed: ``path``.
    """

    path: Path
    kind: Kind
    files: Path

    @property
    def is_universal(self) -> bool:
        """Whether it has a file for each state of each parameter, not for each rank."""
        return (self.files / "zero" / "optimizer_state.pt").is_file()

    @property
    def is_of_trainer(self) -> bool:
        """Whether transformers.Trainer wrote it: with its state, schedule and random states."""
        return self.kind in (Kind.TRANSFORMERS, Kind.PLAIN_TRAINER)


def recognise(path: Path) -> Foreign | None:
    """What ``path`` is if DeepSpeed or transformers.Trainer wrote it, else None.

    Args:
        path: the directory given to ``save_checkpoint``, a ``checkpoint-N`` of transformers, or the directory of one
            step (``global_step<N>``).
    """
    for files in (path, *_pointed_at(path)):
        if any(files.glob(_MODEL_FILES)):
            found = Foreign(path, Kind.PLAIN, files)
            if files != path and (path / "trainer_state.json").is_file():
                return found._replace(kind=Kind.TRANSFORMERS)
            return found._replace(kind=Kind.UNIVERSAL) if found.is_universal else found
    if (path / "trainer_state.json").is_file() and any((path / name).is_file() for name in _PLAIN_TRAINER):
        return Foreign(path, Kind.PLAIN_TRAINER, path)
    return None


def _pointed_at(path: Path) -> list[Path]:
    pointers = [path / name for name in _POINTERS if (path / name).is_file()]
    return [path / pointer.read_text(encoding="utf-8", errors="replace").strip() for pointer in pointers]


def read_foreign(path: Path, trusted: bool) -> Any:
    """What ``torch.save`` wrote to ``path``; tensors stay in the file until they are looked at.

    The few classes of DeepSpeed and numpy of which its checkpoints consist are known. Anything else may run code.

    Raises:
        ConfigError: there is something else in it and it is not ``trusted``, or it is no such file.
    """
    keywords: dict[str, Any] = {"map_location": "cpu", "mmap": True, "weights_only": not trusted}
    try:
        with torch.serialization.safe_globals(_known_classes()):
            return torch.load(path, **keywords)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), str(error))
        raise ConfigError(
            f"{path} holds more than tensors, plain values and DeepSpeed's own classes, so that reading it may run "
            f"any code. If you know where it comes from, set trust_checkpoint=True (--trust-pickles on the command "
            f"line). ({reason.strip()[:300]})"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): it is damaged or incomplete."
        ) from None


def check_pickles(directory: Path, trusted: bool) -> None:
    """Read the structure of all files of ``directory`` (not their tensors), so that others may load them.

    Raises:
        ConfigError: as :func:`read_foreign`.
    """
    if not trusted:
        for path in sorted(directory.rglob("*.pt")):
            read_foreign(path, trusted)


def _known_classes() -> list[Any]:
    import numpy as np
    from deepspeed.checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    rebuild = np.array([0]).__reduce__()[0]  # its module has another name in every version of numpy
    arrays = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), rebuild]
    return [ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler, SubparamShape, *arrays]

"""Checkpoints in other formats (DeepSpeed, transformers.Trainer): detected by their files, and read safely."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_trainer.utils.errors import ConfigError

_POINTERS = ("latest", "latest_universal")
_MODEL_FILES = "*_model_states.pt"
_HF_TRAINER = ("optimizer.pt", "training_args.bin")  # only the second: weights without optimizer, or FSDP


class CheckpointFormat(Enum):
    """The program that wrote a checkpoint."""

    DEEPSPEED = "DeepSpeed's engine.save_checkpoint"
    DEEPSPEED_UNIVERSAL = "DeepSpeed's ds_to_universal"
    HF_TRAINER_DEEPSPEED = "transformers.Trainer with DeepSpeed"
    HF_TRAINER = "transformers.Trainer"


class ConvertibleCheckpoint(NamedTuple):
    """A checkpoint in another format.

    Attributes:
        path: as the user gave it.
        format: the program that wrote it.
        files: the directory with DeepSpeed's files: ``path``, or ``global_step<N>`` in it. Without DeepSpeed: ``path``.
    """

    path: Path
    format: CheckpointFormat
    files: Path

    @property
    def is_universal(self) -> bool:
        """Whether it has one file for each state of each parameter, instead of one per rank."""
        return (self.files / "zero" / "optimizer_state.pt").is_file()

    @property
    def is_hf_trainer(self) -> bool:
        """Whether transformers.Trainer wrote it, with trainer state, schedule and random states."""
        return self.format in (CheckpointFormat.HF_TRAINER_DEEPSPEED, CheckpointFormat.HF_TRAINER)


def detect_format(path: Path) -> ConvertibleCheckpoint | None:
    """Returns the checkpoint at ``path`` if DeepSpeed or transformers.Trainer wrote it, else None.

    Args:
        path: the directory given to ``save_checkpoint``, a ``checkpoint-N`` of transformers, or the directory of one
            step (``global_step<N>``).
    """
    pointers = [path / name for name in _POINTERS if (path / name).is_file()]
    pointed_at = [path / pointer.read_text(encoding="utf-8", errors="replace").strip() for pointer in pointers]
    for files in (path, *pointed_at):
        if any(files.glob(_MODEL_FILES)):
            checkpoint = ConvertibleCheckpoint(path, CheckpointFormat.DEEPSPEED, files)
            if files != path and (path / "trainer_state.json").is_file():
                return checkpoint._replace(format=CheckpointFormat.HF_TRAINER_DEEPSPEED)
            if checkpoint.is_universal:
                return checkpoint._replace(format=CheckpointFormat.DEEPSPEED_UNIVERSAL)
            return checkpoint
    if (path / "trainer_state.json").is_file() and any((path / name).is_file() for name in _HF_TRAINER):
        return ConvertibleCheckpoint(path, CheckpointFormat.HF_TRAINER, path)
    return None


def load_deepspeed_pickle(path: Path, trusted: bool) -> Any:
    """Returns the object that ``torch.save`` wrote to ``path``. Tensors are memory-mapped.

    Allows tensors, plain values, and the few classes of DeepSpeed and numpy that DeepSpeed's checkpoints contain.
    Unpickling anything else may run any code.

    Raises:
        ConfigError: the file holds something else and is not ``trusted``, or cannot be read.
    """
    arguments: dict[str, Any] = {"map_location": "cpu", "mmap": True, "weights_only": not trusted}
    try:
        with torch.serialization.safe_globals(_allowed_classes()):
            return torch.load(path, **arguments)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), str(error))
        raise ConfigError(
            f"{path} holds more than tensors, plain values and DeepSpeed's own classes. Reading it may run any code. "
            "If you trust its source, set trust_checkpoint=True (--trust-checkpoint on the command line). "
            f"({reason.strip()[:300]})"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): it is damaged or incomplete."
        ) from None


def check_pickles(directory: Path, trusted: bool) -> None:
    """Read the structure of all ``*.pt`` files in ``directory`` (not their tensors), so that other code may load them.

    Raises:
        ConfigError: as :func:`load_deepspeed_pickle`.
    """
    if not trusted:
        for path in sorted(directory.rglob("*.pt")):
            load_deepspeed_pickle(path, trusted)


def _allowed_classes() -> list[Any]:
    import numpy as np
    from deepspeed.checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    rebuild = np.array([0]).__reduce__()[0]  # the name of its module depends on the version of numpy
    arrays = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), rebuild]
    return [ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler, SubparamShape, *arrays]

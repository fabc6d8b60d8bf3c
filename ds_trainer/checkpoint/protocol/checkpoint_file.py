"""The files that one rank contributes to a checkpoint. Each has a name and writes itself to a stream."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch

from ds_trainer.checkpoint.protocol.file_records import StoredFile
from ds_trainer.checkpoint.protocol.shared_files import SharedFiles
from ds_trainer.utils.errors import ConfigError


class CheckpointFile(Protocol):
    """One file of a checkpoint."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint directory."""

    def write(self, stream: BinaryIO) -> None:
        """Write the whole file from the beginning, without seeking."""


@runtime_checkable
class WritesSharedFiles(Protocol):
    """A checkpoint file that also writes this rank's part of files that all ranks write together."""

    def write_shared(self, files: SharedFiles) -> None:
        """Write this rank's part; called after the file itself is written."""


@dataclass(frozen=True)
class InMemoryFile:
    """A small file whose bytes are already in memory, so later steps do not change it."""

    name: str
    data: bytes

    @classmethod
    def of(cls, name: str, value: Any) -> InMemoryFile:
        """A file that holds ``value`` as ``torch.save`` writes it."""
        stream = io.BytesIO()
        torch.save(value, stream)
        return cls(name, stream.getvalue())

    def write(self, stream: BinaryIO) -> None:
        """Write the content to ``stream``."""
        stream.write(self.data)


@dataclass(frozen=True)
class GeneratedFile:
    """A file whose bytes are generated when it is written, in the thread that writes it.

    Attributes:
        name: its name in the checkpoint directory.
        generate: returns the bytes; must not depend on anything that later steps change.
    """

    name: str
    generate: Callable[[], bytes]

    def write(self, stream: BinaryIO) -> None:
        """Write the content to ``stream``."""
        stream.write(self.generate())


@dataclass(frozen=True)
class FallbackFile:
    """A file for ``from_pretrained`` that is left out if an overridden ``save_model`` has written one of its name.

    Attributes:
        file: written otherwise.
    """

    file: CheckpointFile

    @property
    def name(self) -> str:
        """Its name in the checkpoint directory."""
        return self.file.name

    def write(self, stream: BinaryIO) -> None:
        """Write the content to ``stream``."""
        self.file.write(stream)


@dataclass(frozen=True)
class UnchangedFile:
    """A file that an earlier checkpoint holds already: hard-linked if possible, written again otherwise.

    Attributes:
        file: written if the link fails.
        stored: the earlier file; None if the file is always written and only its shared files are linked.
    """

    file: CheckpointFile
    stored: StoredFile | None

    @property
    def name(self) -> str:
        """Name of the file in the checkpoint."""
        return self.file.name

    def write(self, stream: BinaryIO) -> None:
        """Write the content to ``stream``."""
        self.file.write(stream)

    def write_shared(self, files: SharedFiles) -> None:
        """Write the elements that shared files hold."""
        if isinstance(self.file, WritesSharedFiles):
            self.file.write_shared(files)


def load_pickle(path: Path, trusted: bool) -> Any:
    """Returns the object that ``torch.save`` wrote to ``path``, on the CPU.

    Tensors and plain values are read without unpickling code. Only a file that holds more (for example, the state of a
    user's own schedule) is fully unpickled, and only if it is ``trusted``, because that may run any code.

    Args:
        path: the file.
        trusted: an intact manifest of this package lists the file, or the user vouched for it.

    Raises:
        ConfigError: the file holds more than plain values and is not trusted.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not trusted:
            raise ConfigError(
                f"{path} holds more than tensors and plain values. Reading it may run any code, and no intact manifest "
                f"lists it. If you trust its source, set trust_checkpoint=True. ({str(error).splitlines()[0]})"
            ) from None
    return torch.load(path, map_location="cpu", weights_only=False)

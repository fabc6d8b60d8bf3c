"""What one rank puts into a checkpoint: named files, each of which knows how to write itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch

from ds_trainer.checkpoint.protocol.files import Stored
from ds_trainer.checkpoint.protocol.shared_files import SharedFiles


class Content(Protocol):
    """One file of a checkpoint."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint's directory."""

    def write(self, stream: BinaryIO) -> None:
        """Write all of it, from the beginning, without seeking."""


@runtime_checkable
class WritesShared(Protocol):
    """A content that also writes its part of files that many ranks write."""

    def write_shared(self, files: SharedFiles) -> None:
        """Write it, after the content itself."""


@dataclass(frozen=True)
class Held:
    """A small file that is in memory already: later steps do not change it."""

    name: str
    data: bytes

    @classmethod
    def of(cls, name: str, value: Any) -> Held:
        """``value`` as ``torch.save`` writes it."""
        stream = io.BytesIO()
        torch.save(value, stream)
        return cls(name, stream.getvalue())

    def write(self, stream: BinaryIO) -> None:
        stream.write(self.data)


@dataclass(frozen=True)
class Made:
    """A file whose bytes are made when it is written, in the thread that writes it.

    Attributes:
        make: of what later steps do not change.
    """

    name: str
    make: Callable[[], bytes]

    def write(self, stream: BinaryIO) -> None:
        stream.write(self.make())


@dataclass(frozen=True)
class Unchanged:
    """What earlier checkpoints hold: linked to, and written again only where that cannot be done.

    Attributes:
        content: what is written then.
        stored: the earlier file; None where it is written again in any case, and only shared files are linked to.
    """

    content: Content
    stored: Stored | None

    @property
    def name(self) -> str:
        return self.content.name

    def write(self, stream: BinaryIO) -> None:
        self.content.write(stream)

    def write_shared(self, files: SharedFiles) -> None:
        if isinstance(self.content, WritesShared):
            self.content.write_shared(files)

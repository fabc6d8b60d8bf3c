"""Checkpoints without an engine: small files, written by the real protocol, in one process or with threads as ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.checkpoint.protocol.shared_files import SharedFile, SharedFiles
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from ds_trainer.checkpoint.selection import VerifiedCheckpoint, newest_valid_checkpoint

T = TypeVar("T")

METADATA: dict[str, Any] = {"layout": {"world_size": 1}, "zero_stage": 0, "precision": "fp32", "arguments": "0" * 64}
FILES = ("rank_00000.safetensors", "progress.pt", "trainer_state.json")
SHARED = "model.safetensors"
ONE = WriterGroup(rank=0, ranks=(0,), node=0, nodes=1, leaders=())


class _SingleRank:
    """The communicator of a single rank."""

    def gather_to_main(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value


alone = _SingleRank()


def bytes_of(step: int, name: str, run: int = 0) -> bytes:
    """The contents of a file in the checkpoint of a step; each ``run`` writes different contents."""
    return f"{name} of step {step} of run {run}. ".encode() * 400


def files_of(step: int, run: int = 0, names: tuple[str, ...] = FILES) -> list[InMemoryFile]:
    """Files of one rank."""
    return [InMemoryFile(name, bytes_of(step, name, run)) for name in names]


HEADER_SIZE = 400  # bytes


@dataclass(frozen=True)
class SharedFileWriter:
    """A file of one rank that also writes its part of :data:`SHARED`: 50 of each ``ranks`` x 50 bytes."""

    name: str
    data: bytes
    whole: bytes
    rank: int = 0
    ranks: int = 1

    def write(self, stream: BinaryIO) -> None:
        stream.write(self.data)

    def write_shared(self, files: SharedFiles) -> None:
        rows = np.frombuffer(self.whole, np.uint8)[HEADER_SIZE:].reshape(-1, self.ranks * 50)
        columns = rows[:, self.rank * 50 : (self.rank + 1) * 50]
        with files.open(SHARED) as writer:
            if self.ranks == 1:
                writer.write(HEADER_SIZE, [memoryview(self.whole)[HEADER_SIZE:]])
            else:
                writer.write_rows(HEADER_SIZE + self.rank * 50, self.ranks * 50, np.ascontiguousarray(columns))


def shared_of(content: bytes) -> list[SharedFile]:
    """The shared file whose final contents are ``content``."""
    return [SharedFile(SHARED, len(content), content[:HEADER_SIZE])]


def save(where: Path | CheckpointDirectory, step: int, retention: Retention | None = None, run: int = 0) -> Path:
    """Write ``checkpoint-<step>`` as a run of one rank does."""
    directory = where if isinstance(where, CheckpointDirectory) else CheckpointDirectory(where)
    content = bytes_of(step, SHARED, run)
    file = SharedFileWriter("rank_00001.safetensors", bytes_of(step, "rank_00001.safetensors", run), content)
    files = [*files_of(step, run), file]
    path = CheckpointSave(directory, ONE, step, METADATA, alone, shared_of(content)).run(files)
    (retention or Retention()).apply(directory)
    return path


def resume(output_dir: Path) -> tuple[VerifiedCheckpoint, dict[str, bytes]]:
    """What a new run does first: clean up, and select the newest valid checkpoint. Also returns its files' contents."""
    directory = CheckpointDirectory(output_dir)
    directory.tidy()
    checkpoint = newest_valid_checkpoint(directory, ONE, alone)
    return checkpoint, {name: (checkpoint.path / name).read_bytes() for name in checkpoint.manifest.files}


def on_ranks(count: int, function: Callable[[int, Communicator], T]) -> list[T | BaseException]:
    """Runs ``function(rank, communicator)`` in a thread for every rank; returns what each returned or raised."""
    barrier = threading.Barrier(count, timeout=60)
    slots: list[Any] = [None] * count
    results: list[Any] = [None] * count

    def rank(index: int) -> None:
        class ThreadCommunicator:
            def gather(self, value: Any) -> list[Any]:
                slots[index] = value
                barrier.wait()
                values = list(slots)
                barrier.wait()
                return values

            def gather_to_main(self, value: Any) -> list[Any] | None:
                values = self.gather(value)
                return values if index == 0 else None

            def broadcast_object(self, value: Any) -> Any:
                return self.gather(value)[0]

        try:
            results[index] = function(index, ThreadCommunicator())
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results

"""Checkpoints without an engine: small files, written by the real protocol, in one process or in threads for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ds_trainer.checkpoint.protocol.choosing import Checkpoint, newest_valid
from ds_trainer.checkpoint.protocol.contents import Held
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.checkpoint.protocol.saving import CheckpointSave
from ds_trainer.checkpoint.protocol.shared_files import SharedFile, SharedFiles
from ds_trainer.checkpoint.protocol.sharing import Messages, Sharing

T = TypeVar("T")

FACTS: dict[str, Any] = {"layout": {"world_size": 1}, "zero_stage": 0, "precision": "fp32", "arguments": "0" * 64}
FILES = ("rank_00000.safetensors", "progress.pt", "trainer_state.json")
SHARED = "model.safetensors"
ONE = Sharing(rank=0, ranks=(0,), node=0, nodes=1, firsts=())


class _Alone:
    """What one rank hears from all."""

    def gather_to_main(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value


alone = _Alone()


def bytes_of(step: int, name: str, run: int = 0) -> bytes:
    """What a file of the checkpoint of a step holds; another ``run`` writes something else."""
    return f"{name} of step {step} of run {run}. ".encode() * 400


def contents_of(step: int, run: int = 0, names: tuple[str, ...] = FILES) -> list[Held]:
    """Files of one rank."""
    return [Held(name, bytes_of(step, name, run)) for name in names]


HEAD = 400  # bytes


@dataclass(frozen=True)
class InPlace:
    """A file of one rank, which also writes its share of :data:`SHARED`: of ``ranks`` x 50 bytes its 50."""

    name: str
    data: bytes
    whole: bytes
    rank: int = 0
    ranks: int = 1

    def write(self, stream: BinaryIO) -> None:
        stream.write(self.data)

    def write_shared(self, files: SharedFiles) -> None:
        rows = np.frombuffer(self.whole, np.uint8)[HEAD:].reshape(-1, self.ranks * 50)
        mine = rows[:, self.rank * 50 : (self.rank + 1) * 50]
        with files.open(SHARED) as writer:
            if self.ranks == 1:
                writer.write(HEAD, [memoryview(self.whole)[HEAD:]])
            else:
                writer.write_rows(HEAD + self.rank * 50, self.ranks * 50, np.ascontiguousarray(mine))


def shared_of(whole: bytes) -> list[SharedFile]:
    """The shared file that ends up as ``whole``."""
    return [SharedFile(SHARED, len(whole), whole[:HEAD])]


def save(output_dir: Path, step: int, retention: Retention | None = None, run: int = 0) -> Path:
    """Write ``checkpoint-<step>`` as a run of one rank does."""
    directory = CheckpointDirectory(output_dir)
    whole = bytes_of(step, SHARED, run)
    own = InPlace("rank_00001.safetensors", bytes_of(step, "rank_00001.safetensors", run), whole)
    contents = [*contents_of(step, run), own]
    path = CheckpointSave(directory, ONE, step, FACTS, alone, shared_of(whole)).run(contents)
    (retention or Retention()).apply(directory)
    return path


def resume(output_dir: Path) -> tuple[Checkpoint, dict[str, bytes]]:
    """What a new run does first: settle what is left, take the newest whole checkpoint; its files' contents."""
    directory = CheckpointDirectory(output_dir)
    directory.tidy()
    found = newest_valid(directory, ONE, alone)
    return found, {name: (found.path / name).read_bytes() for name in found.manifest.files}


def on_ranks(count: int, function: Callable[[int, Messages], T]) -> list[T | BaseException]:
    """``function(rank, messages)`` in a thread for every rank; what each returned or raised."""
    barrier = threading.Barrier(count, timeout=60)
    slots: list[Any] = [None] * count
    results: list[Any] = [None] * count

    def rank(index: int) -> None:
        class Heard:
            def gather(self, value: Any) -> list[Any]:
                slots[index] = value
                barrier.wait()
                told = list(slots)
                barrier.wait()
                return told

            def gather_to_main(self, value: Any) -> list[Any] | None:
                told = self.gather(value)
                return told if index == 0 else None

            def broadcast_object(self, value: Any) -> Any:
                return self.gather(value)[0]

        try:
            results[index] = function(index, Heard())
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results

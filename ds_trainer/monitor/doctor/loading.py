"""How fast weights come from a disk: measured with the reader that loads models, over the files of a model."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_trainer.checkpoint.loading.range_reader import RangeReader
from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor, stored_tensors
from ds_trainer.checkpoint.weights.geometry import View
from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.monitor.units import human_duration
from ds_trainer.utils.errors import ConfigError

SAMPLE_BYTES = 4 * 2**30
"""How much is read, by default, at most."""
SECONDS = 10.0
"""When reading ends, however much is left."""
_PIECE = 64 * 2**20  # bytes that are read at a time
_RANKS = (1, 8, 64)
_RANKS_A_NODE = 8


@dataclass(frozen=True)
class Rate:
    """What was measured.

    Attributes:
        read_bytes: bytes that were read.
        seconds: how long that took.
        file_bytes: bytes of all weights of the directory.
        tensors, files: how many there are.
        cached: whether the system could not be told to forget the files first: they may have come from memory.
    """

    read_bytes: int
    seconds: float
    file_bytes: int
    tensors: int
    files: int
    cached: bool

    @property
    def bytes_per_second(self) -> float:
        return self.read_bytes / self.seconds


def measure_rate(directory: Path, sample_bytes: int = SAMPLE_BYTES, seconds: float = SECONDS) -> Rate:
    """Read a sample of the weights of ``directory`` that is spread over all files.

    Args:
        directory: of a model.
        sample_bytes: read at most so much.
        seconds: and stop after this time.

    Raises:
        ConfigError: there are no weight files, or they are damaged or empty.
    """
    stored = stored_tensors(directory)
    total = sum(tensor.nbytes for tensor in stored.values())
    if total == 0:
        raise ConfigError(f"{directory} has no weights to read: its tensors are empty.")
    paths = {tensor.path for tensor in stored.values()}
    forgotten = all([_forget(path) for path in paths])
    reader, target = RangeReader(), torch.empty(_PIECE, dtype=torch.uint8)
    began = time.monotonic()
    for tensor, first, length in _sample(stored, sample_bytes / total):
        # As bytes: a disk does not know types.
        plain = StoredTensor(tensor.path, torch.uint8, "U8", (tensor.nbytes,), (1,), tensor.offset)
        reader.read([(plain, View((length,), (1,), first), View((length,), (1,)))], target)
        if time.monotonic() - began > seconds:
            break
    reader.close()
    return Rate(reader.bytes_read, reader.seconds, total, len(stored), len(paths), not forgotten)


def _sample(stored: Mapping[str, StoredTensor], share: float) -> Iterator[tuple[StoredTensor, int, int]]:
    """Pieces of tensors in the order of the files: tensor, first byte, number of bytes. ``share`` of all of them."""
    wanted = given = 0.0
    for tensor in sorted(stored.values(), key=lambda one: (one.path, one.offset)):
        for first in range(0, tensor.nbytes, _PIECE):
            length = min(_PIECE, tensor.nbytes - first)
            wanted += length * min(1.0, share)
            take = min(length, round(wanted - given))
            if take > 0:
                given += take
                yield tensor, first, take


def _forget(path: Path) -> bool:
    """Tell the system to drop what it keeps of a file in memory; whether it can be told."""
    if not hasattr(os, "posix_fadvise"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True


def loading_findings(directory: Path, sample_bytes: int = SAMPLE_BYTES) -> list[Finding]:
    """The rate at which the weights of ``directory`` are read, and how long ranks take to load them.

    Raises:
        ConfigError: there are no weight files, or they are damaged or empty.
    """
    rate = measure_rate(directory, sample_bytes)
    remedy = "The files may have come from memory: this system cannot be told to forget them." if rate.cached else ""
    said = (
        f"{rate.bytes_per_second / 1e9:.2f} GB/s ({rate.read_bytes / 1e9:.3g} GB of {directory} in "
        f"{human_duration(rate.seconds)}; {rate.tensors} tensors in {rate.files} files, {rate.file_bytes / 1e9:.3g} GB)"
    )
    level = Level.WARN if remedy else Level.OK
    return [Finding(level, "rate of reading", said, remedy), *_times(rate, _RANKS)]


def _times(rate: Rate, counts: Sequence[int]) -> list[Finding]:
    """Each rank reads its own part, so that together they read every byte once."""
    alone = rate.file_bytes / rate.bytes_per_second
    found = []
    for count in counts:
        nodes = -(-count // _RANKS_A_NODE)
        said = f"{human_duration(alone)} (every byte is read once, at this rate for all ranks together)"
        if nodes > 1:
            each = human_duration(alone / nodes)
            said = f"{each} where each of {nodes} nodes gets this rate, {human_duration(alone)} where they share it"
        found.append(Finding(Level.OK, f"load by {count} rank{'s' if count > 1 else ''}", said))
    return found

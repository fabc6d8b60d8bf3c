"""Read speed of model weights, measured with the reader that loads models, over the files of a model."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_trainer.checkpoint.loading.range_reader import RangeReader
from ds_trainer.checkpoint.loading.stored_tensors import StoredTensor, stored_tensors
from ds_trainer.checkpoint.weights.strided_views import StridedView
from ds_trainer.monitor.doctor.findings import Finding, Level
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted, human_bytes, human_duration

SAMPLE_BYTES = 4 * 10**9
"""Largest sample, by default."""
SECONDS = 10.0
"""Longest time of a measurement."""
_BLOCK_BYTES = 64 * 2**20  # size of one read
_RANKS = (1, 8, 64)
_RANKS_A_NODE = 8


@dataclass(frozen=True)
class Rate:
    """The result of a measurement.

    Attributes:
        read_bytes: bytes read.
        seconds: time of the reads.
        file_bytes: bytes of all weights in the directory.
        tensors, files: their numbers.
        cached: whether the files may have been in the page cache, because it could not be dropped before.
    """

    read_bytes: int
    seconds: float
    file_bytes: int
    tensors: int
    files: int
    cached: bool

    @property
    def bytes_per_second(self) -> float:
        """Bytes read in a second."""
        return self.read_bytes / self.seconds


def measure_rate(directory: Path, sample_bytes: int = SAMPLE_BYTES, seconds: float = SECONDS) -> Rate:
    """Read a sample of the weights in ``directory``, spread over all files.

    Args:
        directory: a model directory.
        sample_bytes: largest sample.
        seconds: longest time.

    Raises:
        ConfigError: there are no weight files, or they are damaged or empty.
    """
    stored = stored_tensors(directory)
    total = sum(tensor.nbytes for tensor in stored.values())
    if total == 0:
        raise ConfigError(f"{directory} has no weights to read: its tensors are empty.")
    paths = {tensor.path for tensor in stored.values()}
    dropped = all([_drop_from_cache(path) for path in paths])
    reader, target = RangeReader(), torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
    began = time.monotonic()
    for tensor, first, length in _sample(stored, sample_bytes / total):
        # As bytes: the dtype does not matter.
        plain = StoredTensor(tensor.path, torch.uint8, "U8", (tensor.nbytes,), (1,), tensor.offset)
        reader.read([(plain, StridedView((length,), (1,), first), StridedView((length,), (1,)))], target)
        if time.monotonic() - began > seconds:
            break
    reader.close()
    return Rate(reader.bytes_read, reader.seconds, total, len(stored), len(paths), not dropped)


def _sample(stored: Mapping[str, StoredTensor], fraction: float) -> Iterator[tuple[StoredTensor, int, int]]:
    """Blocks of tensors in file order: tensor, first byte, number of bytes. Together a ``fraction`` of all bytes."""
    wanted = given = 0.0
    for tensor in sorted(stored.values(), key=lambda one: (one.path, one.offset)):
        for first in range(0, tensor.nbytes, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, tensor.nbytes - first)
            wanted += length * min(1.0, fraction)
            take = min(length, round(wanted - given))
            if take > 0:
                given += take
                yield tensor, first, take


def _drop_from_cache(path: Path) -> bool:
    """Ask the system to drop a file from its page cache; False if it has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True


def loading_findings(directory: Path, sample_bytes: int = SAMPLE_BYTES) -> list[Finding]:
    """The read speed of the weights in ``directory``, and the resulting load times of several numbers of ranks.

    Raises:
        ConfigError: there are no weight files, or they are damaged or empty.
    """
    rate = measure_rate(directory, sample_bytes)
    remedy = (
        "The page cache cannot be dropped on this system: the files may have been in memory." if rate.cached else ""
    )
    message = (
        f"{human_bytes(rate.bytes_per_second)}/s ({human_bytes(rate.read_bytes)} of {directory} in "
        f"{human_duration(rate.seconds)}; {counted(rate.tensors, 'tensor')} in "
        f"{counted(rate.files, 'file')}, {human_bytes(rate.file_bytes)})"
    )
    level = Level.WARN if remedy else Level.OK
    return [Finding(level, "read speed", message, remedy), *_times(rate, _RANKS)]


def _times(rate: Rate, counts: Sequence[int]) -> list[Finding]:
    """Load times. Each rank reads its own part, so that together they read every byte once."""
    alone = rate.file_bytes / rate.bytes_per_second
    findings = []
    for count in counts:
        nodes = -(-count // _RANKS_A_NODE)
        message = f"{human_duration(alone)} (the ranks read every byte once and share this speed)"
        if nodes > 1:
            each = human_duration(alone / nodes)
            message = (
                f"{each} if each of {counted(nodes, 'node')} reads at this speed, {human_duration(alone)} if they "
                "share it"
            )
        findings.append(Finding(Level.OK, f"load on {count} rank{'s' if count > 1 else ''}", message))
    return findings

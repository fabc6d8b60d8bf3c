"""Files that all ranks write together: complete, with the right checksum, and damage anywhere is detected."""

from __future__ import annotations

import os
import random
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ds_trainer.checkpoint import selection
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave, SaveFailed
from ds_trainer.checkpoint.protocol.crc32 import append_zeros, finalize, register, register_of_rows
from ds_trainer.checkpoint.protocol.file_records import checksum, partial_checksum
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint
from ds_trainer.checkpoint.protocol.shared_files import SharedFile, SharedFiles, combine_records
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from ds_trainer.checkpoint.selection import verify_checkpoint
from tests.support.checkpoints import HEADER_SIZE, METADATA, SHARED, SharedFileWriter, on_ranks, shared_of


def test_part_checksums_combine_to_the_file_checksum() -> None:
    """The result is ``zlib.crc32`` for any division into parts, in any order."""
    choose = random.Random(0)
    for size in [0, 1, 2, 3, 7, 8, 63, 64, 1000, 2**16, 2**16 + 1, 1_000_003]:
        data = choose.randbytes(size)
        edges = sorted({0, size, *(choose.randrange(size + 1) for _ in range(9))})
        parts = list(pairwise(edges))
        choose.shuffle(parts)
        value = 0
        for first, last in parts:
            value ^= append_zeros(register(data[first:last]), size - last)
        assert finalize(value, size) == zlib.crc32(data)
        zeros = bytes(size)
        assert finalize(0, size) == zlib.crc32(zeros)
    for size in (2**31, 2**40 + 5):  # too large to compute here: appended zeros add up
        assert append_zeros(append_zeros(0x12345678, size), 77) == append_zeros(0x12345678, size + 77)


def test_checksums_of_rows_combine() -> None:
    matrix = np.random.default_rng(0).integers(0, 256, (57, 300), np.uint8)
    for first, last in ((0, 300), (10, 11), (100, 228), (299, 300)):
        alone = np.zeros_like(matrix)
        alone[:, first:last] = matrix[:, first:last]
        value = register_of_rows([row.data for row in np.ascontiguousarray(matrix[:, first:last])], 300)
        assert finalize(append_zeros(value, 300 - last), matrix.size) == zlib.crc32(alone.tobytes())


def test_a_large_range_is_written_in_chunks(tmp_path: Path) -> None:
    data = os.urandom(5 * 2**20 + 3)
    file = SharedFile("x", len(data) + 8, b"12345678")
    one, other = SharedFiles(tmp_path, [file]), SharedFiles(tmp_path, [file])
    one.create()
    middle = 3 * 2**20 + 1
    with other.open("x") as writer:
        writer.write(8 + middle, [memoryview(data)[middle : middle + 2**20], memoryview(data)[middle + 2**20 :]])
    with one.open("x") as writer:
        writer.write(8, [memoryview(data)[:middle]])
    records = combine_records([file], [*one.parts.values(), *other.parts.values()])
    assert (tmp_path / "x").read_bytes() == b"12345678" + data
    assert records[0] == ("x", len(data) + 8, zlib.crc32(b"12345678" + data))
    with pytest.raises(ValueError, match=r"x has \d+ bytes, but the ranks wrote \d+"):
        combine_records([file], one.parts.values())


WHOLE = np.random.default_rng(1).integers(0, 256, HEADER_SIZE + 40 * 200, np.uint8).tobytes()


def saved(directory: Path, ranks: int, idle: int | None = None) -> Path:
    """A checkpoint that ``ranks`` write, in threads; rank ``idle`` writes nothing."""

    def write(rank: int, communicator: Communicator) -> Path:
        writer_group = WriterGroup(rank, range(ranks), 0, 1, ())
        name = f"rank_{rank:05d}.safetensors"
        file = SharedFileWriter(name, b"own", WHOLE, rank, ranks)
        files = [] if rank == idle else [file]
        save = CheckpointSave(CheckpointDirectory(directory), writer_group, 4, METADATA, communicator, shared_of(WHOLE))
        return save.run(files)

    results = on_ranks(ranks, write)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return Path(str(results[0]))


def verify(path: Path, ranks: int) -> list[object]:
    return list(
        on_ranks(ranks, lambda rank, comm: verify_checkpoint(path, WriterGroup(rank, range(ranks), 0, 1, ()), comm))
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_write_one_file(ranks: int, tmp_path: Path) -> None:
    path = saved(tmp_path, ranks)
    assert (path / SHARED).read_bytes() == WHOLE
    assert all(not isinstance(one, BaseException) for one in verify(path, 3))
    (tmp_path / "idle").mkdir()
    with pytest.raises(SaveFailed, match=r"rank 0 failed to write its manifest: .* but the ranks wrote"):
        saved(tmp_path / "idle", ranks, idle=1)
    assert not list((tmp_path / "idle").glob("*")), "leftovers"


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_damage_anywhere_is_detected(ranks: int, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each rank reads only a part."""
    monkeypatch.setattr(selection, "SPLIT_BYTES", 0 if split else 2**30)
    path = saved(tmp_path, 2)
    size = len(WHOLE)
    for at in (0, HEADER_SIZE - 1, HEADER_SIZE, size // 3 - 1, size // 3, size // 2, size - 1):
        (path / SHARED).write_bytes(WHOLE[:at] + bytes([WHOLE[at] ^ 4]) + WHOLE[at + 1 :])
        results = verify(path, ranks)
        assert all(isinstance(one, BrokenCheckpoint) for one in results)
        assert f"{SHARED} is damaged (checksum" in str(results[0])
    (path / SHARED).write_bytes(WHOLE[:-1])
    assert f"{SHARED} has {size - 1} bytes instead of {size}" in str(verify(path, ranks)[0])
    (path / SHARED).unlink()
    assert f"{SHARED} is missing" in str(verify(path, ranks)[0])
    (path / SHARED).write_bytes(WHOLE)
    assert not any(isinstance(one, BaseException) for one in verify(path, ranks))


def test_large_files_are_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(WHOLE)
    for count in (1, 2, 7):
        value = 0
        for index in range(count):
            value ^= partial_checksum(path, len(WHOLE), index, count)
        assert finalize(value, len(WHOLE)) == checksum(path) == zlib.crc32(WHOLE)


@pytest.mark.parametrize("operation", ["resize", "open_shared", "write_at"])
def test_a_failing_disk_is_reported(operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, operation, full)
    with pytest.raises(SaveFailed, match="No space left") as error:
        saved(tmp_path, 2)
    assert error.value.by_disk
    assert not list(tmp_path.glob("*")), "leftovers"

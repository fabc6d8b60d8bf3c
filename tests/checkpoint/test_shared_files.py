"""Files that all ranks write together: whole, summed right, and damage of them is noticed wherever it is."""

from __future__ import annotations

import os
import random
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ds_trainer.checkpoint.protocol import choosing, disk
from ds_trainer.checkpoint.protocol.choosing import verified
from ds_trainer.checkpoint.protocol.crc32 import finished, register, register_of_rows, shifted
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.files import checksum, part_of_checksum
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint
from ds_trainer.checkpoint.protocol.saving import CheckpointSave, SaveFailed
from ds_trainer.checkpoint.protocol.shared_files import SharedFile, SharedFiles, put_together
from ds_trainer.checkpoint.protocol.sharing import Messages, Sharing
from tests.support.checkpoints import FACTS, HEAD, SHARED, InPlace, on_ranks, shared_of


def test_sums_of_parts_make_the_sum_of_the_file() -> None:
    """Whatever the cuts, the order and who summed: it is ``zlib.crc32``."""
    choose = random.Random(0)
    for size in [0, 1, 2, 3, 7, 8, 63, 64, 1000, 2**16, 2**16 + 1, 1_000_003]:
        data = choose.randbytes(size)
        cuts = sorted({0, size, *(choose.randrange(size + 1) for _ in range(9))})
        parts = list(pairwise(cuts))
        choose.shuffle(parts)
        found = 0
        for first, last in parts:
            found ^= shifted(register(data[first:last]), size - last)
        assert finished(found, size) == zlib.crc32(data)
        zeros = bytes(size)
        assert finished(0, size) == zlib.crc32(zeros)
    for size in (2**31, 2**40 + 5):  # larger than what is summed here: shifting adds up
        assert shifted(shifted(0x12345678, size), 77) == shifted(0x12345678, size + 77)


def test_sums_of_rows() -> None:
    matrix = np.random.default_rng(0).integers(0, 256, (57, 300), np.uint8)
    for first, last in ((0, 300), (10, 11), (100, 228), (299, 300)):
        alone = np.zeros_like(matrix)
        alone[:, first:last] = matrix[:, first:last]
        found = register_of_rows([row.data for row in np.ascontiguousarray(matrix[:, first:last])], 300)
        assert finished(shifted(found, 300 - last), matrix.size) == zlib.crc32(alone.tobytes())


def test_a_large_run_is_written_in_chunks(tmp_path: Path) -> None:
    data = os.urandom(5 * 2**20 + 3)
    file = SharedFile("x", len(data) + 8, b"12345678")
    one, other = SharedFiles(tmp_path, [file]), SharedFiles(tmp_path, [file])
    one.make()
    middle = 3 * 2**20 + 1
    with other.open("x") as writer:
        writer.write(8 + middle, [memoryview(data)[middle : middle + 2**20], memoryview(data)[middle + 2**20 :]])
    with one.open("x") as writer:
        writer.write(8, [memoryview(data)[:middle]])
    records = put_together([file], [*one.parts.values(), *other.parts.values()])
    assert (tmp_path / "x").read_bytes() == b"12345678" + data
    assert records[0] == ("x", len(data) + 8, zlib.crc32(b"12345678" + data))
    with pytest.raises(ValueError, match=r"x has \d+ bytes, and all ranks together wrote \d+"):
        put_together([file], one.parts.values())


WHOLE = np.random.default_rng(1).integers(0, 256, HEAD + 40 * 200, np.uint8).tobytes()


def saved(directory: Path, ranks: int, lazy: int | None = None, fails: bool = False) -> Path:
    """A checkpoint that ``ranks`` write, in threads; of rank ``lazy`` nothing comes."""

    def write(rank: int, messages: Messages) -> Path:
        sharing = Sharing(rank, range(ranks), 0, 1, ())
        name = f"rank_{rank:05d}.safetensors"
        own = InPlace(name, b"own", WHOLE, rank, ranks)
        contents = [] if rank == lazy else [own]
        save = CheckpointSave(CheckpointDirectory(directory), sharing, 4, FACTS, messages, shared_of(WHOLE))
        return save.run(contents)

    found = on_ranks(ranks, write)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return Path(str(found[0]))


def looked_at(path: Path, ranks: int) -> list[object]:
    return list(on_ranks(ranks, lambda rank, heard: verified(path, Sharing(rank, range(ranks), 0, 1, ()), heard)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_write_one_file(ranks: int, tmp_path: Path) -> None:
    path = saved(tmp_path, ranks)
    assert (path / SHARED).read_bytes() == WHOLE
    assert all(not isinstance(one, BaseException) for one in looked_at(path, 3))
    (tmp_path / "lazy").mkdir()
    with pytest.raises(SaveFailed, match=r"rank 0 failed to list its files: .* all ranks together wrote"):
        saved(tmp_path / "lazy", ranks, lazy=1)
    assert not list((tmp_path / "lazy").glob("*")), "something is left"


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_damage_is_noticed_wherever_it_is(
    ranks: int, divided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each rank reads a part only."""
    monkeypatch.setattr(choosing, "_DIVIDED", 0 if divided else 2**30)
    path = saved(tmp_path, 2)
    size = len(WHOLE)
    for at in (0, HEAD - 1, HEAD, size // 3 - 1, size // 3, size // 2, size - 1):
        (path / SHARED).write_bytes(WHOLE[:at] + bytes([WHOLE[at] ^ 4]) + WHOLE[at + 1 :])
        found = looked_at(path, ranks)
        assert all(isinstance(one, BrokenCheckpoint) for one in found)
        assert f"{SHARED} is damaged (checksum" in str(found[0])
    (path / SHARED).write_bytes(WHOLE[:-1])
    assert f"{SHARED} has {size - 1} bytes instead of {size}" in str(looked_at(path, ranks)[0])
    (path / SHARED).unlink()
    assert f"{SHARED} is missing" in str(looked_at(path, ranks)[0])
    (path / SHARED).write_bytes(WHOLE)
    assert not any(isinstance(one, BaseException) for one in looked_at(path, ranks))


def test_large_files_are_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(WHOLE)
    for count in (1, 2, 7):
        found = 0
        for index in range(count):
            found ^= part_of_checksum(path, len(WHOLE), index, count)
        assert finished(found, len(WHOLE)) == checksum(path) == zlib.crc32(WHOLE)


@pytest.mark.parametrize("operation", ["resize", "open_shared", "write_at"])
def test_a_disk_that_fails(operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, operation, full)
    with pytest.raises(SaveFailed, match="No space left") as error:
        saved(tmp_path, 2)
    assert error.value.by_disk
    assert not list(tmp_path.glob("*")), "something is left"

"""``save_on_each_node``: every machine has its own directory, and a checkpoint counts only if all machines have it."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path

import pytest

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory, list_checkpoints
from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave, SaveFailed
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from ds_trainer.checkpoint.selection import VerifiedCheckpoint, newest_valid_checkpoint, verify_checkpoint
from tests.support.checkpoints import METADATA, files_of, on_ranks

HOSTS = ("one", "two", "one", "two")  # of four ranks on two machines, alternating


@pytest.fixture(autouse=True)
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank (a thread here) sees the host name of its machine."""
    monkeypatch.setattr(socket, "gethostname", lambda: HOSTS[int(threading.current_thread().name)])


def name_thread(rank: int) -> None:
    threading.current_thread().name = str(rank)


def write(root: Path, step: int) -> list[Path | BaseException]:
    def of_rank(rank: int, communicator: Communicator) -> Path:
        name_thread(rank)
        writer_group = WriterGroup.of(True, rank, 4, communicator)
        directory = CheckpointDirectory(root / HOSTS[rank])
        of_this_rank = [InMemoryFile(f"rank_{rank:05d}.safetensors", b"%d" % (step * 10 + rank))]
        shared = files_of(step, names=("progress.pt",)) if writer_group.is_leader else []
        return CheckpointSave(directory, writer_group, step, METADATA, communicator).run([*of_this_rank, *shared])

    return on_ranks(4, of_rank)


def select(root: Path, on_each_node: bool = True) -> list[VerifiedCheckpoint | BaseException]:
    def of_rank(rank: int, communicator: Communicator) -> VerifiedCheckpoint:
        name_thread(rank)
        writer_group = WriterGroup.of(on_each_node, rank, 4, communicator)
        return newest_valid_checkpoint(CheckpointDirectory(root / HOSTS[rank]), writer_group, communicator)

    return on_ranks(4, of_rank)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for host in set(HOSTS):
        (tmp_path / host).mkdir()
    return tmp_path


def test_every_node_commits_its_own_directory(root: Path) -> None:
    assert write(root, 2) == [root / HOSTS[rank] / "checkpoint-2" for rank in range(4)]
    checkpoints = select(root)
    manifests = []
    for rank, checkpoint in enumerate(checkpoints):
        assert isinstance(checkpoint, VerifiedCheckpoint)
        assert checkpoint.path == root / HOSTS[rank] / "checkpoint-2"
        manifests.append(checkpoint.manifest)
    assert [(manifest.node, manifest.nodes) for manifest in manifests] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert len({manifest.save_id for manifest in manifests}) == 1
    assert set(manifests[0].files) == {"rank_00000.safetensors", "rank_00002.safetensors", "progress.pt"}
    assert set(manifests[1].files) == {"rank_00001.safetensors", "rank_00003.safetensors", "progress.pt"}


def test_a_checkpoint_that_one_node_lacks_does_not_count(root: Path) -> None:
    for step in (2, 4, 6):
        write(root, step)
    shutil.rmtree(root / "two" / "checkpoint-6")
    (root / "one" / "checkpoint-4" / "progress.pt").write_bytes(b"damaged")
    for checkpoint in select(root):
        assert isinstance(checkpoint, VerifiedCheckpoint) and checkpoint.manifest.step == 2
    shutil.rmtree(root / "one" / "checkpoint-2")
    for error in select(root):
        assert isinstance(error, BrokenCheckpoint) and "checkpoint-6 is not on all nodes" in str(error)


def test_the_same_name_of_another_save_is_rejected(root: Path) -> None:
    write(root, 2)
    shutil.copytree(root / "one" / "checkpoint-2", root / "copy")
    write(root, 2)
    shutil.rmtree(root / "one" / "checkpoint-2")
    (root / "copy").rename(root / "one" / "checkpoint-2")
    for error in select(root):
        assert isinstance(error, BrokenCheckpoint) and "not on all nodes" in str(error)

    def of_rank(rank: int, communicator: Communicator) -> VerifiedCheckpoint:
        name_thread(rank)
        return verify_checkpoint(
            root / HOSTS[rank] / "checkpoint-2", WriterGroup.of(True, rank, 4, communicator), communicator
        )

    for error in on_ranks(4, of_rank):
        assert isinstance(error, BrokenCheckpoint) and "a checkpoint of another save" in str(error)


def test_a_single_part_is_rejected(root: Path) -> None:
    write(root, 2)
    (root / "two" / "checkpoint-2").rename(root / "moved")
    shutil.rmtree(root / "two")
    (root / "two").symlink_to(root / "one")  # all use one directory
    for error in select(root, on_each_node=False):
        assert isinstance(error, BrokenCheckpoint) and "part of node 0 of 2 (save_on_each_node)" in str(error)


def test_a_failure_on_one_node_fails_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of one machine is full: no machine gets the new checkpoint, and all keep the old one."""
    write(root, 2)
    original = disk.open_new

    def full(path: Path) -> int:
        if "two" in path.parts and path.name == "manifest.json":
            raise OSError(28, "No space left on device", str(path))
        return original(path)

    monkeypatch.setattr(disk, "open_new", full)
    for error in write(root, 4):
        assert isinstance(error, SaveFailed) and error.by_disk
        assert "rank 1 failed to write its manifest" in str(error) and "No space left on device" in str(error)
    for host in ("one", "two"):
        assert [path.name for path in list_checkpoints(root / host)] == ["checkpoint-2"]
        assert not list((root / host).glob(".*"))

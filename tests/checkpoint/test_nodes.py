"""``save_on_each_node``: every machine has its own directory, and a checkpoint is what all of them have."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path

import pytest

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.choosing import Checkpoint, newest_valid, verified
from ds_trainer.checkpoint.protocol.contents import Held
from ds_trainer.checkpoint.protocol.directory import CheckpointDirectory, list_checkpoints
from ds_trainer.checkpoint.protocol.manifest import BrokenCheckpoint
from ds_trainer.checkpoint.protocol.saving import CheckpointSave, SaveFailed
from ds_trainer.checkpoint.protocol.sharing import Messages, Sharing
from tests.support.checkpoints import FACTS, contents_of, on_ranks

HOSTS = ("one", "two", "one", "two")  # of four ranks on two machines, dealt out in turn


@pytest.fixture(autouse=True)
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank (a thread here) believes to be on its machine."""
    monkeypatch.setattr(socket, "gethostname", lambda: HOSTS[int(threading.current_thread().name)])


def named(rank: int) -> None:
    threading.current_thread().name = str(rank)


def write(root: Path, step: int) -> list[Path | BaseException]:
    def of_rank(rank: int, messages: Messages) -> Path:
        named(rank)
        sharing = Sharing.of(True, rank, 4, messages)
        directory = CheckpointDirectory(root / HOSTS[rank])
        mine = [Held(f"rank_{rank:05d}.safetensors", b"%d" % (step * 10 + rank))]
        shared = contents_of(step, names=("progress.pt",)) if sharing.commits else []
        return CheckpointSave(directory, sharing, step, FACTS, messages).run([*mine, *shared])

    return on_ranks(4, of_rank)


def found(root: Path, on_each_node: bool = True) -> list[Checkpoint | BaseException]:
    def of_rank(rank: int, messages: Messages) -> Checkpoint:
        named(rank)
        sharing = Sharing.of(on_each_node, rank, 4, messages)
        return newest_valid(CheckpointDirectory(root / HOSTS[rank]), sharing, messages)

    return on_ranks(4, of_rank)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for host in set(HOSTS):
        (tmp_path / host).mkdir()
    return tmp_path


def test_every_node_commits_its_own_directory(root: Path) -> None:
    assert write(root, 2) == [root / HOSTS[rank] / "checkpoint-2" for rank in range(4)]
    checkpoints = found(root)
    manifests = []
    for rank, checkpoint in enumerate(checkpoints):
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.path == root / HOSTS[rank] / "checkpoint-2"
        manifests.append(checkpoint.manifest)
    assert [(manifest.node, manifest.nodes) for manifest in manifests] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert len({manifest.save_id for manifest in manifests}) == 1
    assert set(manifests[0].files) == {"rank_00000.safetensors", "rank_00002.safetensors", "progress.pt"}
    assert set(manifests[1].files) == {"rank_00001.safetensors", "rank_00003.safetensors", "progress.pt"}


def test_what_one_node_lacks_does_not_count(root: Path) -> None:
    for step in (2, 4, 6):
        write(root, step)
    shutil.rmtree(root / "two" / "checkpoint-6")
    (root / "one" / "checkpoint-4" / "progress.pt").write_bytes(b"damaged")
    for checkpoint in found(root):
        assert isinstance(checkpoint, Checkpoint) and checkpoint.manifest.step == 2
    shutil.rmtree(root / "one" / "checkpoint-2")
    for error in found(root):
        assert isinstance(error, BrokenCheckpoint) and "checkpoint-6 is not on all nodes" in str(error)


def test_the_same_name_of_another_save_is_another_checkpoint(root: Path) -> None:
    write(root, 2)
    shutil.copytree(root / "one" / "checkpoint-2", root / "kept")
    write(root, 2)
    shutil.rmtree(root / "one" / "checkpoint-2")
    (root / "kept").rename(root / "one" / "checkpoint-2")
    for error in found(root):
        assert isinstance(error, BrokenCheckpoint) and "not on all nodes" in str(error)

    def of_rank(rank: int, messages: Messages) -> Checkpoint:
        named(rank)
        return verified(root / HOSTS[rank] / "checkpoint-2", Sharing.of(True, rank, 4, messages), messages)

    for error in on_ranks(4, of_rank):
        assert isinstance(error, BrokenCheckpoint) and "another one, of another save" in str(error)


def test_a_part_alone_is_refused(root: Path) -> None:
    write(root, 2)
    (root / "two" / "checkpoint-2").rename(root / "aside")
    shutil.rmtree(root / "two")
    (root / "two").symlink_to(root / "one")  # all look into one directory
    for error in found(root, on_each_node=False):
        assert isinstance(error, BrokenCheckpoint) and "part of node 0 of 2 (save_on_each_node)" in str(error)


def test_a_node_that_fails_fails_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of one machine is full: no machine has the new checkpoint, all have the old one."""
    write(root, 2)
    original = disk.open_new

    def full(path: Path) -> int:
        if "two" in path.parts and path.name == "manifest.json":
            raise OSError(28, "No space left on device", str(path))
        return original(path)

    monkeypatch.setattr(disk, "open_new", full)
    for error in write(root, 4):
        assert isinstance(error, SaveFailed) and error.by_disk
        assert "rank 1 failed to list its files" in str(error) and "No space left on device" in str(error)
    for host in ("one", "two"):
        assert [path.name for path in list_checkpoints(root / host)] == ["checkpoint-2"]
        assert not list((root / host).glob(".*"))

"""Failed saves: a disk that is full, read-only or missing. All ranks raise the error, and nothing is lost."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ds_trainer import TrainerCallback
from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory, list_checkpoints
from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave, SaveFailed
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from ds_trainer.checkpoint.selection import verify_checkpoint
from ds_trainer.utils import distributed
from ds_trainer.utils.collective_limit import collective_limit, set_collective_limit
from ds_trainer.utils.errors import ConfigError
from tests.support.checkpoints import METADATA, ONE, alone, bytes_of, files_of, on_ranks, resume, save
from tests.support.pool import pool
from tests.training.resume.test_resumption import make_trainer


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system of ``size``; skips the test if none can be mounted."""
    directory.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def entries(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if entry.name != "latest")


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as directory:
        save(directory, 2)
        big = [*files_of(4), InMemoryFile("big.bin", bytes(2 * 2**20))]
        with pytest.raises(SaveFailed, match=r"rank 0 failed to write its files: OSError: .*No space left") as error:
            CheckpointSave(CheckpointDirectory(directory), ONE, 4, METADATA, alone).run(big)
        assert error.value.by_disk
        assert entries(directory) == ["checkpoint-2"]
        save(directory, 6, Retention(keep=1))  # there is space again: the unfinished checkpoint was removed
        assert resume(directory)[0].manifest.step == 6


def test_any_amount_of_free_space_leaves_a_complete_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same step again, at every amount of free space from nothing to enough; the pointer never lacks space."""
    failed = 0
    with small_disk(tmp_path / "disk", "256k") as directory:
        save(directory, 2)
        for free in range(0, 128, 4):
            dummy = directory / "dummy"
            free_now = shutil.disk_usage(directory).free
            dummy.write_bytes(bytes(max(0, free_now - free * 1024)))
            try:
                save(directory, 2, run=1)
            except SaveFailed as error:
                failed += 1
                assert error.by_disk
                assert entries(directory) == ["checkpoint-2", "dummy"]
                files = resume(directory)[1]
                assert files == {name: bytes_of(2, name) for name in files}
            else:
                break
            dummy.unlink()
        assert failed > 5
        assert resume(directory)[1] == {name: bytes_of(2, name, 1) for name in files}
    assert "could not be updated" not in caplog.text


def test_a_file_size_quota_is_reported(tmp_path: Path) -> None:
    """A limit on file sizes, as an account may have; needs no root."""
    save(tmp_path, 2)
    process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            save(tmp_path, 4)
        except SaveFailed as error:
            os._exit(7 if error.by_disk and os.strerror(errno.EFBIG) in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    assert entries(tmp_path) == ["checkpoint-2"]
    assert resume(tmp_path)[0].manifest.step == 2


def test_a_disk_that_becomes_read_only_is_reported(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as directory:
        save(directory, 2)
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
        with pytest.raises(SaveFailed, match=r"failed to create a directory for it: OSError: .*Read-only"):
            save(directory, 4)
        assert resume(directory)[0].manifest.step == 2


def test_a_deleted_directory_is_reported(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    save(directory, 2)
    shutil.rmtree(directory)
    with pytest.raises(SaveFailed, match="failed to create a directory for it: FileNotFoundError"):
        save(directory, 4)
    assert not directory.exists()  # it is not created again on another disk


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_mount_that_cannot_flush_directories_has_checkpoints(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with some FUSE and SMB servers; files are flushed there."""
    flushed, original = [0, 0], os.fsync

    def fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        flushed[is_directory] += 1
        if is_directory:
            raise OSError(code, os.strerror(code))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 2)
    save(tmp_path, 4, Retention(keep=1))
    assert all(flushed) and entries(tmp_path) == ["checkpoint-4"]
    assert resume(tmp_path)[0].manifest.step == 4


@pytest.mark.parametrize("operation", ["make_directory", "open_new", "write", "flush", "flush_file", "rename"])
def test_a_failure_of_any_operation_leaves_a_complete_checkpoint(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of each operation fails in turn: the error names it, and the old or the new checkpoint is complete.

    Once the new one has its name, the save has not failed: a warning says what has.
    """
    original = getattr(disk, operation)
    for at in range(1, 100):
        directory, calls = tmp_path / str(at), 0
        directory.mkdir()
        save(directory, 2)

        def failing(*arguments: Any, at: int = at) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(errno.EIO, "Input/output error")
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(disk, operation, failing)
            try:
                save(directory, 2, run=1)
            except SaveFailed as error:
                assert error.by_disk and "Input/output error" in str(error)
                new = False
            else:
                if calls < at:
                    return
                new = True
        assert new or entries(directory) == ["checkpoint-2"]
        checkpoint, files = resume(directory)
        assert checkpoint.manifest.generation == (2 if new else checkpoint.manifest.generation)
        assert entries(directory) == ["checkpoint-2"]
        assert files == {name: bytes_of(2, name, checkpoint.manifest.generation - 1) for name in files}
    raise AssertionError("it never succeeded")


def test_a_failure_on_one_rank_fails_all(tmp_path: Path) -> None:
    class Broken(InMemoryFile):
        def write(self, stream: Any) -> None:
            stream.write(self.data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    class Wrong(InMemoryFile):
        def write(self, stream: Any) -> None:
            raise TypeError("not of a type that can be written")

    save(tmp_path, 2)
    for kind, by_disk in ((Broken, True), (Wrong, False)):

        def of_rank(rank: int, communicator: Communicator, kind: type[InMemoryFile] = kind) -> Path:
            writer_group = WriterGroup.of(False, rank, 3, communicator)
            names = (f"rank_{rank:05d}.safetensors",)
            files = [(kind if rank == 2 else InMemoryFile)(name, bytes_of(4, name)) for name in names]
            return CheckpointSave(CheckpointDirectory(tmp_path), writer_group, 4, METADATA, communicator).run(files)

        for error in on_ranks(3, of_rank):
            assert isinstance(error, SaveFailed) and error.by_disk is by_disk
            assert "rank 2 failed to write its files" in str(error) and error.failed_rank == 2
        assert entries(tmp_path) == ["checkpoint-2"]


# -- a training --------------------------------------------------------------------------------------------------------


class _FullAt(TrainerCallback):
    """Simulates a full disk, or a bug, from one step to another."""

    def __init__(self, first: int, last: int, open_new: Callable[[Path], int]) -> None:
        self.first, self.last, self.open_new = first, last, open_new
        self.saved: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        disk.open_new = self.open_new if self.first <= state.global_step <= self.last else _OPEN_NEW  # type: ignore[assignment]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)


_OPEN_NEW = disk.open_new


def _full(path: Path) -> int:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def _wrong(path: Path) -> int:
    raise TypeError("No space for a bug")


def train_on_a_full_disk(
    output_dir: str, failure: str, open_new: Callable[[Path], int] = _full
) -> tuple[str, list[int], list[float]]:
    trainer = make_trainer(output_dir, save_steps=2, save_failure_policy=failure, save_async=False)
    full = _FullAt(4, 5, open_new)
    trainer.add_callback(full)
    message = ""
    try:
        trainer.train()
    except SaveFailed as error:
        message = str(error)
    finally:
        disk.open_new = _OPEN_NEW  # type: ignore[assignment]
    trainer.engine.close()
    return message, full.saved, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_run_continues_with_save_failure_continue(tmp_path: Path) -> None:
    for message, saved, losses in pool(2).run(partial(train_on_a_full_disk, str(tmp_path), "continue")):
        assert message == "" and saved == [2, 6, 8] and len(losses) == 8
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("policy", "open_new"), [("stop", _full), ("continue", _wrong)])
def test_the_run_stops_by_default(policy: str, open_new: Any, tmp_path: Path) -> None:
    """And at a bug always."""
    for message, saved, losses in pool(2).run(partial(train_on_a_full_disk, str(tmp_path), policy, open_new)):
        assert "checkpoint-4 could not be written" in message and "No space" in message
        assert saved == [2] and len(losses) == 4
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert not list(tmp_path.glob(".*"))


def rejection(output_dir: str) -> str:
    try:
        make_trainer(output_dir).train()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_second_training_is_rejected_on_all_ranks(tmp_path: Path) -> None:
    from tests.checkpoint.protocol.test_directory_lock import held_by_another

    with held_by_another(tmp_path) as process:
        messages = pool(2).run(rejection, str(tmp_path))
    assert messages[0] == messages[1]
    assert f"output_dir={tmp_path} (argument) is in use by another training: process {process} on" in messages[0]


def slow_save(folder: str) -> list[str]:
    """A save that waits for training, in which the disk of rank 1 takes longer than a collective may."""

    class OnASlowDisk(InMemoryFile):
        def write(self, stream: Any) -> None:
            time.sleep(1.6 * distributed.rank())
            super().write(stream)

    directory, usual = CheckpointDirectory(Path(folder)), collective_limit()
    group = WriterGroup.of(False, distributed.rank(), 2, distributed)
    set_collective_limit(timedelta(seconds=1))
    try:
        name = f"rank_{distributed.rank():05d}.safetensors"
        path = CheckpointSave(directory, group, 2, METADATA, distributed).run([OnASlowDisk(name, b"bytes")])
        return sorted(verify_checkpoint(path, group, distributed).manifest.files)
    finally:
        set_collective_limit(usual)


def test_a_slow_disk_of_one_rank_is_waited_for(tmp_path: Path) -> None:
    written = ["rank_00000.safetensors", "rank_00001.safetensors"]
    assert pool(2).run(slow_save, str(tmp_path)) == [written] * 2

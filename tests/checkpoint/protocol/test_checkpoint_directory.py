"""Names, order, replacement and removal of checkpoints."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import (
    CheckpointDirectory,
    check_sizes,
    find_checkpoint,
    list_checkpoints,
)
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, BrokenCheckpoint, Manifest
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.utils.errors import ConfigError
from tests.support.checkpoints import FILES, bytes_of, resume, save


def names(directory: Path) -> list[str]:
    return [path.name for path in list_checkpoints(directory)]


def test_a_checkpoint_appears_with_its_manifest_and_the_pointer(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-3", "latest"]
    assert (tmp_path / "latest").read_text() == "checkpoint-3\n"
    manifest = Manifest.read(path)
    assert (manifest.step, manifest.generation, manifest.nodes) == (3, 1, 1)
    assert set(manifest.versions) == {"python", "ds-trainer", "torch", "deepspeed"}
    assert {entry.name for entry in path.iterdir()} == {*manifest.files, MANIFEST_FILE}
    for name, record in manifest.files.items():
        assert record.size == len(bytes_of(3, name))


def test_checkpoints_are_in_writing_order(tmp_path: Path) -> None:
    """A new run in an old directory writes smaller steps; 10 comes after 9."""
    for step in (9, 10, 2):
        save(tmp_path, step)
    assert names(tmp_path) == ["checkpoint-9", "checkpoint-10", "checkpoint-2"]
    assert resume(tmp_path)[0].path.name == "checkpoint-2"


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    for run in (1, 2):
        save(tmp_path, 4, run=run)
    checkpoint, files = resume(tmp_path)
    assert checkpoint.manifest.generation == 2
    assert files == {name: bytes_of(4, name, 2) for name in files}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-4", "latest"]


def test_other_directories_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()  # of another program
    (tmp_path / "checkpoint-notes").mkdir()
    for step in (1, 2):
        save(tmp_path, step, Retention(keep=1))
    assert names(tmp_path) == ["checkpoint-2"]
    assert (tmp_path / "checkpoint-7").is_dir() and (tmp_path / "checkpoint-notes").is_dir()


def test_leftovers_are_removed_and_a_replaced_checkpoint_is_restored(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    os.rename(tmp_path / "checkpoint-4", tmp_path / ".checkpoint-4.0123abcd.old")
    for name in (".checkpoint-6.0123abcd.partial", ".checkpoint-2.0123abcd.old", ".checkpoint-1.0123abcd.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("half")
    (tmp_path / ".latest.0123abcd.partial").write_text("checkp")
    (tmp_path / ".checkpoint-9.partial").mkdir()  # not one of ours
    assert find_checkpoint(True, tmp_path) is None  # one that tidy() may restore
    actions = CheckpointDirectory(tmp_path).tidy()
    assert len(actions) == 4
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == [".checkpoint-9.partial", "checkpoint-2", "checkpoint-4", "latest"]
    assert resume(tmp_path)[0].path.name == "checkpoint-4"


# -- retention ---------------------------------------------------------------------------------------------------------


def test_the_oldest_are_removed(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, Retention(keep=2))
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]


def test_the_best_and_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, Retention(keep=1, best=tmp_path / "checkpoint-2"))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-5"]


def test_save_keep_every_keeps_checkpoints(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, Retention(keep=2, every=3))
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-5", "checkpoint-6", "checkpoint-7"]


def size_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.iterdir())


def test_a_byte_limit_removes_the_oldest(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    size = max(size_of(path) for path in tmp_path.glob("checkpoint-*"))
    directory = CheckpointDirectory(tmp_path)
    Retention(keep_bytes=5 * size).apply(directory)
    assert len(names(tmp_path)) == 5
    Retention(keep_bytes=4 * size - size // 2).apply(directory)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]
    Retention(keep_bytes=2 * size, every=4).apply(directory)  # which does not count
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]
    Retention(keep_bytes=1, best=tmp_path / "checkpoint-3").apply(directory)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-5"], "the newest and the best are kept"


def test_shared_bytes_count_once(tmp_path: Path) -> None:
    first, *others = (save(tmp_path, step) for step in (1, 2, 3))
    size, shared = size_of(first), (first / FILES[0]).stat().st_size
    limit = shared + 3 * (size - shared) + 100
    for path in others:
        (path / FILES[0]).unlink()
        os.link(first / FILES[0], path / FILES[0])  # as frozen weights are
    directory = CheckpointDirectory(tmp_path)
    Retention(keep_bytes=limit).apply(directory)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    Retention(keep_bytes=limit - 200).apply(directory)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert check_sizes(directory.entries()[0])


def test_the_last_complete_checkpoint_is_never_removed(tmp_path: Path) -> None:
    """The newest has lost a file before the others are due for removal."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "checkpoint-3" / "progress.pt").unlink()
    directory = CheckpointDirectory(tmp_path)
    Retention(keep=1).apply(directory)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert resume(tmp_path)[0].path.name == "checkpoint-2"


def test_damaged_checkpoints_are_removed_first(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    manifest = tmp_path / "checkpoint-2" / MANIFEST_FILE
    manifest.write_text(manifest.read_text()[:-30])
    Retention(keep=2).apply(CheckpointDirectory(tmp_path))
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert not (tmp_path / "checkpoint-2").exists()


def test_a_failed_removal_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    logging.getLogger("ds_trainer").propagate = True
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove_file", refuse)
        save(tmp_path, 2, Retention(keep=1))
    assert "could not be removed" in caplog.text
    assert names(tmp_path) == ["checkpoint-2"]  # the other has already lost its name
    CheckpointDirectory(tmp_path).tidy()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-2", "latest"]


# -- selecting ---------------------------------------------------------------------------------------------------------

DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "bit flipped": lambda path: path.write_bytes(_flipped(path.read_bytes())),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
}


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "progress.pt", "trainer_state.json", MANIFEST_FILE])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(
    damage: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("ds_trainer").propagate = True
    save(tmp_path, 2)
    save(tmp_path, 4)
    DAMAGES[damage](tmp_path / "checkpoint-4" / name)
    checkpoint, files = resume(tmp_path)
    assert checkpoint.path.name == "checkpoint-2"
    assert files == {file: bytes_of(2, file) for file in files}
    if (damage, name) != ("missing", MANIFEST_FILE):  # without a manifest, it is not a checkpoint
        assert "Skipping checkpoint-4" in caplog.text and name in caplog.text
    DAMAGES["missing"](tmp_path / "checkpoint-2" / "progress.pt")
    with pytest.raises(BrokenCheckpoint, match=r"no valid checkpoint.*progress\.pt is missing"):
        resume(tmp_path)


def test_a_flipped_bit_in_a_manifest_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path, 2) / MANIFEST_FILE
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(BrokenCheckpoint):
            Manifest.read(path.parent)


def test_another_format_is_rejected_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from ds_trainer.checkpoint.protocol.file_writer import CheckpointFileWriter

    path = save(tmp_path, 2)
    newer = replace(Manifest.read(path), format=2)
    (path / MANIFEST_FILE).unlink()
    newer.write(CheckpointFileWriter(path))
    with pytest.raises(BrokenCheckpoint, match="format 2 of ds_trainer; this version of ds_trainer reads format 1"):
        Manifest.read(path)


def test_a_missing_checkpoint_is_rejected_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        find_checkpoint("True", tmp_path / "nowhere")
    save(tmp_path, 2)
    assert find_checkpoint(True, tmp_path) is None
    assert find_checkpoint(str(tmp_path / "checkpoint-2"), tmp_path) == tmp_path / "checkpoint-2"
    with pytest.raises(ConfigError, match=r"it has no manifest\.json.*checkpoint-2"):
        find_checkpoint(str(tmp_path), tmp_path)

"""What ranks that save together agree on: whose failure it was, which generation it is, and what must not go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_trainer.checkpoint.protocol import disk
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory, list_checkpoints
from ds_trainer.checkpoint.protocol.checkpoint_file import InMemoryFile
from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave, SaveFailed
from ds_trainer.checkpoint.protocol.manifest import Manifest
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.checkpoint.protocol.writer_group import Communicator, WriterGroup
from tests.support.checkpoints import METADATA, ONE, alone, files_of, on_ranks, save


def failing(*errors: Exception | None) -> list[BaseException]:
    """What each rank of a save gets if ranks fail like this."""

    def of_rank(rank: int, messages: Communicator, directory: Path) -> Path:
        def contents() -> Iterator[InMemoryFile]:
            error = errors[rank]
            if error is not None:
                raise error
            yield InMemoryFile(f"rank_{rank:05d}.safetensors", b"elements")

        group = WriterGroup(rank, range(len(errors)), 0, 1, ())
        return CheckpointSave(CheckpointDirectory(directory), group, 2, METADATA, messages).run(contents())

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        results = on_ranks(len(errors), lambda rank, messages: of_rank(rank, messages, Path(folder)))
        assert list_checkpoints(Path(folder)) == [] and not list(Path(folder).glob(".*"))
    assert all(isinstance(result, SaveFailed) for result in results)
    return results  # type: ignore[return-value]


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("errors", "by_disk"),
    [
        ((FULL, None), True),
        ((FULL, FULL), True),
        ((None, ValueError("a bug")), False),
        ((FULL, ValueError("a bug")), False),
        ((ValueError("a bug"), FULL), False),
    ],
)
def test_a_bug_is_reported_even_if_another_rank_has_a_full_disk(
    errors: tuple[Exception | None, ...], by_disk: bool
) -> None:
    """Only what the disk alone has done may be survived by ``save_failure_policy=continue``."""
    for error in failing(*errors):
        assert isinstance(error, SaveFailed) and error.by_disk is by_disk
        assert ("(and 1 more)" in str(error)) == (None not in errors)


def test_the_first_rank_that_failed_is_named() -> None:
    for error in failing(None, ValueError("a bug"), FULL):
        assert "rank 1 (and 1 more) failed to write its files: ValueError: a bug" in str(error)


@pytest.mark.parametrize("longer", ["one", "two"])
def test_nodes_with_different_histories_take_the_newest_generation(longer: str, tmp_path: Path) -> None:
    """A machine was replaced: its directory is empty. What both write now is newer than all that either has."""
    hosts = ("one", "two")
    for host in hosts:
        (tmp_path / host).mkdir()
    for step in (1, 2, 3):
        save(tmp_path / longer, step)

    def of_rank(rank: int, messages: Communicator) -> Path:
        group = WriterGroup(rank, (rank,), rank, 2, (0, 1))
        contents = [InMemoryFile(f"rank_{rank:05d}.safetensors", b"elements")]
        return CheckpointSave(CheckpointDirectory(tmp_path / hosts[rank]), group, 2, METADATA, messages).run(contents)

    for path in on_ranks(2, of_rank):
        assert isinstance(path, Path) and Manifest.read(path).generation == 4
    assert [path.name for path in list_checkpoints(tmp_path / longer)][-1] == "checkpoint-2"


def test_the_best_checkpoint_is_kept_whatever_the_spelling_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is resumed with another spelling of output_dir than the one that noted the best checkpoint."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "link").symlink_to(runs)
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3, 4):
        save(runs, step)
    for spelling in ("link", "runs/../runs", "runs"):
        Retention(keep=2, best=Path(spelling) / "checkpoint-1").apply(CheckpointDirectory(runs))
        assert [path.name for path in list_checkpoints(runs)] == ["checkpoint-1", "checkpoint-4"]
    Retention(keep=2, best=runs / "checkpoint-1").apply(CheckpointDirectory(Path("link")))
    assert [path.name for path in list_checkpoints(runs)] == ["checkpoint-1", "checkpoint-4"]


def test_every_save_is_newer_than_all_before_it(tmp_path: Path) -> None:
    """Whatever its step, and whatever has been removed since."""
    for generation, step in enumerate((3, 20, 100, 1, 20), start=1):
        path = save(tmp_path, step)
        assert Manifest.read(path).generation == generation
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["checkpoint-3", "checkpoint-100", "checkpoint-1", "checkpoint-20"]


def test_subdirectories_are_flushed_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that something else made, such as DeepSpeed: a file whose name is lost is lost."""
    flushed: list[str] = []
    original, opened = disk.flush_file, disk.open_new
    monkeypatch.setattr(disk, "flush_file", lambda path: (flushed.append(Path(path).name), original(path))[1])
    monkeypatch.setattr(disk, "open_new", lambda path: (flushed.append(f"new {path.name}"), opened(path))[1])

    def by_others(directory: Path) -> None:
        (directory / "outer" / "inner").mkdir(parents=True)
        (directory / "outer" / "inner" / "states.pt").write_bytes(b"elements")

    path = CheckpointSave(CheckpointDirectory(tmp_path), ONE, 2, METADATA, alone).run(files_of(2), by_others)
    assert "outer/inner/states.pt" in Manifest.read(path).files
    manifest = flushed.index("new manifest.json")
    assert {"states.pt", "inner"} <= set(flushed[:manifest])

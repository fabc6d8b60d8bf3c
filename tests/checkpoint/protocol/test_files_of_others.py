"""Nothing of the user's is lost: links, directories of other programs, files outside of the output directory, modes."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.checkpoint.protocol.checkpoint_directory import CheckpointDirectory
from ds_trainer.checkpoint.protocol.checkpoint_save import SaveFailed
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, BrokenCheckpoint
from ds_trainer.checkpoint.protocol.retention import Retention
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import own_files, write_text_atomic
from tests.support.checkpoints import resume, save
from tests.support.models import RaggedTokens, tiny_llama
from tests.support.pool import pool
from tests.training.resume.test_resumption import make_trainer


def files_in(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, Path]:
    """An output directory whose checkpoint-2 was moved to another disk and linked back, and its new place."""
    run, archive = tmp_path / "run", tmp_path / "archive" / "checkpoint-2"
    run.mkdir()
    archive.parent.mkdir()
    save(run, 2).rename(archive)
    (run / "checkpoint-2").symlink_to(archive)
    return run, archive


@pytest.mark.parametrize("limit", [Retention(keep=1), Retention(keep_bytes=1)])
def test_retention_leaves_a_linked_checkpoint(moved: tuple[Path, Path], limit: Retention) -> None:
    run, archive = moved
    before = files_in(archive)
    for step in (4, 6):
        save(run, step, limit)
    assert files_in(archive) == before and (run / "checkpoint-2").is_symlink()
    assert not (run / "checkpoint-4").exists()  # it does not count, either
    assert CheckpointDirectory(run).tidy() == []


@pytest.mark.parametrize("act", ["remove", "replace"])
def test_only_the_link_is_removed(moved: tuple[Path, Path], act: str) -> None:
    run, archive = moved
    before = files_in(archive)
    if act == "remove":
        CheckpointDirectory(run).remove(run / "checkpoint-2")
    else:
        assert not save(run, 2, run=1).is_symlink()
    assert files_in(archive) == before


def test_what_a_killed_process_left_may_be_a_link(moved: tuple[Path, Path]) -> None:
    run, archive = moved
    before = files_in(archive)
    for kind in ("partial", "removed"):
        (run / f".checkpoint-9.0123abcd.{kind}").symlink_to(archive)
    assert len(CheckpointDirectory(run).tidy()) == 0
    assert files_in(archive) == before and files_in(run) >= {"checkpoint-2", "latest"}
    assert not list(run.glob(".checkpoint-*"))


def link_out(run: Path, outside: Path) -> None:
    (run / "checkpoint-2" / "data").symlink_to(outside)
    (run / "checkpoint-2" / "one.bin").symlink_to(outside / "mine.bin")


def link_hard(run: Path, outside: Path) -> None:
    for path in list((run / "checkpoint-2").iterdir()):
        os.link(path, outside / path.name)


def loop(run: Path, outside: Path) -> None:
    (run / "checkpoint-2" / "again").symlink_to(run)
    (run / "checkpoint-3").symlink_to("checkpoint-3")
    (run / "around").symlink_to(".")


def name_alike(run: Path, outside: Path) -> None:
    for name in ("Checkpoint-2", "checkpoint-02.old", "checkpoint-2 ", ".checkpoint-2.partial", "..checkpoint-2.1.old"):
        write_text_atomic(run / name / "mine.bin", "mine")
    (run / "checkpoint-5").write_text("a file")


def move_away(run: Path, outside: Path) -> None:
    (run / "checkpoint-2").rename(outside / "checkpoint-2")


def rename(run: Path, outside: Path) -> None:
    (run / "checkpoint-2").rename(run / "best so far")


def link_the_pointer(run: Path, outside: Path) -> None:
    (run / "latest").unlink()
    (run / "latest").symlink_to(outside / "mine.bin")


SHAPES = [link_out, link_hard, loop, name_alike, move_away, rename, link_the_pointer]


@pytest.mark.parametrize("through", ["", "link", ".."])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_run_touches_only_what_it_has_written(shape: Any, through: str, tmp_path: Path) -> None:
    """Checkpoints are replaced and removed after the user has changed something between two saves."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    write_text_atomic(outside / "mine.bin", "mine")
    write_text_atomic(run / "notes" / "mine.bin", "mine")
    (tmp_path / "link").symlink_to(run)
    path = {"": run, "link": tmp_path / "link", "..": tmp_path / "outside" / ".." / "run"}[through]
    save(path, 2)
    save(path, 4)
    shape(run, outside)
    before = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file() and "mine" in one.name}
    before.update({one: one.read_bytes() for one in outside.rglob("*") if one.is_file()})
    for step in (6, 8):
        save(path, step, Retention(keep=1))
        CheckpointDirectory(path).tidy()
    left = {one: content for one, content in before.items() if not one.is_relative_to(run / "checkpoint-2")}
    assert len(left) >= 2 and {one: one.read_bytes() for one in left} == left
    assert [entry.path.name for entry in CheckpointDirectory(path).entries() if entry.manifest] == ["checkpoint-8"]
    assert (run / "latest").read_text() == "checkpoint-8\n" and (tmp_path / "link").is_symlink()
    assert shape is not rename or (run / "best so far" / MANIFEST_FILE).exists()


@pytest.mark.parametrize("by", ["link", "directory"])
def test_another_directory_of_the_same_name_is_left_alone(by: str, tmp_path: Path) -> None:
    """The output directory is exchanged between two saves of a training: that of another run keeps its checkpoints."""
    run, other = tmp_path / "run", tmp_path / "other"
    for path in (run, other):
        path.mkdir()
        for step in (2, 4):
            save(path, step)
    mine = CheckpointDirectory(run)
    mine.pin()
    run.rename(tmp_path / "moved")
    if by == "link":
        run.symlink_to(other)
    else:
        other.rename(run)
    before = files_in(run)
    text = "failed to create a directory for it: OSError: .*another directory has this name since the training began"
    with pytest.raises(SaveFailed, match=text) as error:
        save(mine, 6, Retention(keep=1))
    assert error.value.by_disk and files_in(run) == before
    (run.unlink if by == "link" else partial(run.rename, other))()
    (tmp_path / "moved").rename(run)  # the name is enough: a parent may be moved, or reached through a link
    save(mine, 6, Retention(keep=1))
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-6"]
    mine.unpin()


MOUNTED = """
from pathlib import Path
from ds_trainer.checkpoint.protocol.retention import Retention
from tests.support.checkpoints import save
save(Path("my run"), 8, Retention(keep=1))
"""


@pytest.mark.parametrize("place", ["checkpoint-2", "checkpoint-2/a b"])
def test_a_checkpoint_with_something_mounted_in_it_is_kept(place: str, tmp_path: Path) -> None:
    """A bind mount of the same file system, which has the number of its device; the others are removed."""
    run, outside = tmp_path / "my run", tmp_path / "outside"
    run.mkdir()
    for step in (2, 4, 6):
        save(run, step)
    outside.mkdir()
    save(outside, 2)
    (run / place).mkdir(exist_ok=True)
    mounts = f"mount --bind outside/checkpoint-2 'my run/{place}' && exec {sys.executable} -c '{MOUNTED}'"
    command = ["unshare", "--mount", "bash", "-c", mounts]
    if subprocess.run([*command[:2], "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount here")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "could not be removed" in ended.stderr and "A file system is mounted there" in ended.stderr
    assert files_in(outside / "checkpoint-2") >= {MANIFEST_FILE, "progress.pt"}
    assert {path.name for path in run.glob("*checkpoint-*")} == {"checkpoint-2", "checkpoint-8"}


@pytest.mark.parametrize(
    ("theirs", "kept_aside"),
    [
        (["mm_projector.bin", "notes/a.txt"], False),  # a script saves its own files under the name of the step
        (["trainer_state.json", "optimizer.pt"], True),  # transformers.Trainer
        ([], False),
    ],
)
def test_a_directory_of_another_program_is_not_replaced(tmp_path: Path, theirs: list[str], kept_aside: bool) -> None:
    other = tmp_path / "checkpoint-4"
    other.mkdir()
    for name in theirs:
        write_text_atomic(other / name, "theirs")
    save(tmp_path, 4)
    directory = next(tmp_path.glob("checkpoint-4.previous-*")) if kept_aside else other
    assert all((directory / name).read_text() == "theirs" for name in theirs)
    assert len(list(tmp_path.glob("checkpoint-4*"))) == 1 + kept_aside
    assert resume(tmp_path)[0].manifest.step == 4
    for step in (6, 8):
        save(tmp_path, step, Retention(keep=1))
    assert not kept_aside or all((directory / name).exists() for name in theirs)


def test_a_file_with_the_name_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").write_text("a list")
    save(tmp_path, 4)
    assert [path.read_text() for path in tmp_path.glob("checkpoint-4.previous-*")] == ["a list"]


@pytest.mark.parametrize("content", ["[" * 100_000 + "]" * 100_000, "", "null", "\0", '{"digest": 1}'])
def test_a_manifest_of_anything_is_a_damaged_one(tmp_path: Path, content: str) -> None:
    save(tmp_path, 2)
    (save(tmp_path, 4) / MANIFEST_FILE).write_text(content)
    assert resume(tmp_path)[0].manifest.step == 2


def test_a_lost_manifest_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / "checkpoint-4" / MANIFEST_FILE).unlink()
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        assert resume(tmp_path)[0].manifest.step == 2
    assert "Skipping checkpoint-4" in caplog.text and "it has no manifest.json" in caplog.text
    for step in (6, 8):
        save(tmp_path, step, Retention(keep=1))
    assert (tmp_path / "checkpoint-4").is_dir()  # nobody knows whose it is
    (tmp_path / "checkpoint-8" / MANIFEST_FILE).unlink()
    assert CheckpointDirectory(tmp_path).has_checkpoints()
    with pytest.raises(BrokenCheckpoint, match=r"checkpoint-4 is not.*checkpoint-8 is not.*set another output_dir"):
        resume(tmp_path)


def test_the_pointer_may_be_impossible(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint is complete then: the save has not failed."""
    write_text_atomic(tmp_path / "latest" / "mine.txt", "mine")
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        save(tmp_path, 2)
    assert "checkpoint-2 is complete, but" in caplog.text and "latest" in caplog.text
    assert resume(tmp_path)[0].manifest.step == 2 and (tmp_path / "latest" / "mine.txt").exists()
    assert CheckpointDirectory(tmp_path).tidy() == [] and not list(tmp_path.glob(".latest*"))


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def trained(output_dir: str, mask: int, resumed: bool, steps: int = 2) -> str:
    with umask(mask):
        trainer = make_trainer(output_dir, None, max_steps=steps, save_steps=2)
        try:
            trainer.train(resume_from_checkpoint=resumed)
            trainer.save_model()
        except ConfigError as error:
            return str(error)
        trainer.engine.close()
    return ""


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_new_files_have_the_mode_of_the_umask(tmp_path: Path, mask: int) -> None:
    assert pool(1).run(trained, str(tmp_path / "run"), mask, False) == [""]
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert len(found) > 12
    assert {name: oct(mode) for name, mode in found.items() if mode != 0o666 & ~mask} == {}
    with umask(mask):
        write_text_atomic(tmp_path / "environment", "SECRET=1", private=True)
    assert stat.S_IMODE((tmp_path / "environment").stat().st_mode) == 0o600


def test_a_new_run_keeps_what_it_could_not_replace(tmp_path: Path) -> None:
    other = tmp_path / "checkpoint-2"
    write_text_atomic(other / "trainer_state.json", json.dumps({"global_step": 2}))
    write_text_atomic(other / "optimizer.pt", "")
    before = files_in(tmp_path)
    for resumed in (False, True):
        (message,) = pool(1).run(trained, str(tmp_path), 0o022, resumed)
        assert "transformers.Trainer wrote it" in message and "set another output_dir" in message
        assert str(other) in message
        assert files_in(tmp_path) >= before
    (other / "optimizer.pt").unlink()
    (other / "trainer_state.json").rename(other / "notes.json")
    assert pool(1).run(trained, str(tmp_path), 0o022, False) == [""]
    assert (other / "notes.json").exists() and (other / MANIFEST_FILE).exists()


class Vocabulary:
    """A tokenizer of a script."""

    def save_pretrained(self, directory: str) -> None:
        Path(directory, "vocab.txt").write_text("a new vocabulary")


def linked_files(output_dir: str, adapters: bool) -> dict[str, Any]:
    """Saves a model to a directory in which the files are links into a cache, as snapshots of the Hub are."""
    model: Any = tiny_llama()
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    run, cache = Path(output_dir, "run"), Path(output_dir, "cache")
    run.mkdir()
    cache.mkdir()
    model.save_pretrained(str(cache))
    write_text_atomic(cache / "vocab.txt", "a vocabulary")
    write_text_atomic(cache / "README.md", "---\nlicense: mit\n---\n# Mine\n")
    for path in cache.iterdir():
        (run / path.name).symlink_to(path)
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    args = TrainingArguments(str(run), use_cpu=True, max_steps=1, save_strategy="no", report_to="none")
    trainer = Trainer(model, args, train_dataset=RaggedTokens(8), processing_class=Vocabulary())  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model()
    trainer.engine.close()
    after = {path.name: path.read_bytes() for path in cache.iterdir()}
    return {name: before[name] == after.get(name) for name in before}


@pytest.mark.parametrize("adapters", [False, True])
def test_saving_writes_through_no_link(tmp_path: Path, adapters: bool) -> None:
    (unchanged,) = pool(1).run(partial(linked_files, str(tmp_path), adapters))
    assert len(unchanged) >= 3 and all(unchanged.values()), unchanged


def test_links_to_weights_are_not_copied(tmp_path: Path) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    run.mkdir()
    cache.mkdir()
    with (cache / "weights.bin").open("wb") as stream:
        stream.truncate(2**26)
    (run / "weights.bin").symlink_to(cache / "weights.bin")
    (run / "gone.json").symlink_to(cache / "gone.json")
    (cache / "tokenizer.json").write_text("theirs")
    os.link(cache / "tokenizer.json", run / "tokenizer.json")
    os.mkfifo(cache / "pipe")
    (run / "pipe").symlink_to(cache / "pipe")
    own_files(run)
    (run / "tokenizer.json").write_text("of this run")  # as a script does it, in place
    assert (cache / "tokenizer.json").read_text() == "theirs"
    assert (run / "weights.bin").is_symlink() and not (run / "gone.json").is_symlink()
    own_files(tmp_path / "missing")


@pytest.mark.parametrize("output_dir", ["", " ", "a\0b", "x" * 5000, "a/" * 3000, "~nosuchuser/x", "/", "//", "/a/.."])
def test_what_is_no_output_directory_is_refused(output_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"^output_dir='[^\n\0]{,400}\.$"):
        TrainingArguments(output_dir, use_cpu=True)

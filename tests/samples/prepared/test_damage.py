"""A prepared dataset that is not what was written is never used, and a process that ends at any point leaves none."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_trainer.samples.prepared import workers
from ds_trainer.samples.prepared.block_file import DamagedDataset
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.prepared.manifest import MANIFEST_FILE, DatasetManifest
from ds_trainer.samples.prepared.prepare import prepare
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import text_with_digest
from tests.samples.prepared.conversations import IDENTITY, Encode, expected, parts_of, read_all, write_conversations

FILES = ("lengths", "offsets", "shard-000000", MANIFEST_FILE)


class Source:
    """Files, how they are prepared, and what the samples are."""

    def __init__(self, directory: Path, encode: Encode) -> None:
        self.paths = write_conversations(directory, files=2, lines=12)
        self.encode = encode
        self.samples = expected(self.paths, encode)

    def prepare(self, directory: Path, **options: Any) -> PreparedDataset:
        values = {"identity": IDENTITY, "vocab_size": 1000, "processes": 1, **options}
        return prepare(parts_of(self.paths), self.encode, directory, files=self.paths, **values)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("source"), Encode())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class TestEveryByte:
    def test_none_can_change_unnoticed(self, source: Source, tmp_path: Path) -> None:
        made = source.prepare(tmp_path)
        for name in FILES:
            path = made.directory / name
            intact = path.read_bytes()
            for at in range(0, len(intact), max(1, len(intact) // 40)):
                flip(path, at)
                with pytest.raises(DamagedDataset, match=name):
                    PreparedDataset(made.directory).verify()
                path.write_bytes(intact)
        assert read_all(PreparedDataset(made.directory)) == source.samples

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("size", [0, -1, +1, None])
    def test_no_file_can_be_shorter_longer_or_missing(
        self, source: Source, tmp_path: Path, name: str, size: int | None
    ) -> None:
        path = source.prepare(tmp_path).directory / name
        if size is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:size] if size < 1 else path.read_bytes() + b"0")
        with pytest.raises(DamagedDataset, match=name):
            PreparedDataset(path.parent)

    def test_a_block_is_verified_before_it_is_used(self, source: Source, tmp_path: Path) -> None:
        """Of data as well, without ``verify``; a block that is not needed is not read."""
        made = source.prepare(tmp_path)
        flip(made.directory / "shard-000000", 0)
        dataset = PreparedDataset(made.directory)
        assert len(dataset.lengths) == len(source.samples)
        with pytest.raises(DamagedDataset, match="shard-000000 is damaged between the bytes 0 and"):
            dataset[5]


class TestWrongDatasets:
    def test_a_damaged_one_is_prepared_again(
        self, source: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in FILES:
            made = source.prepare(tmp_path)
            flip(made.directory / name, 3)
            again = source.prepare(tmp_path, verify=True)
            assert again.report is not None and again.directory == made.directory
            assert read_all(again) == source.samples
            assert source.prepare(tmp_path, verify=True).report is None
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [made.directory.name]

    def test_that_of_another_key_is_refused(self, source: Source, tmp_path: Path) -> None:
        one = source.prepare(tmp_path)
        other = source.prepare(tmp_path, identity={**IDENTITY, "trained on": "all"})
        assert one.directory != other.directory
        shutil.rmtree(other.directory)
        shutil.copytree(one.directory, other.directory)
        with pytest.raises(DamagedDataset, match="instead of"):
            PreparedDataset(other.directory, other.manifest.key)
        assert source.prepare(tmp_path, identity=other.manifest.content["identity"]).report is not None

    def test_a_later_format_is_refused_in_words(self, source: Source, tmp_path: Path) -> None:
        directory = source.prepare(tmp_path).directory
        values = json.loads((directory / MANIFEST_FILE).read_text())
        values["format"] = 2
        del values["digest"]
        (directory / MANIFEST_FILE).write_text(text_with_digest(values))
        with pytest.raises(DamagedDataset, match="has the format 2"):
            PreparedDataset(directory)

    def test_the_manifest_says_what_it_was_made_from(self, source: Source, tmp_path: Path) -> None:
        made = source.prepare(tmp_path)
        assert DatasetManifest.read(made.directory) == made.manifest
        assert made.manifest.content["identity"] == IDENTITY
        assert str(tmp_path) not in made.manifest.to_json()


class TestFilesThatCannotBeWritten:
    def test_a_full_disk(self, source: Source, tmp_path: Path) -> None:
        """The limit of a process on file sizes fails a write in the middle, like a full disk."""
        import resource

        source.prepare(tmp_path / "other")

        def child() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
            with pytest.raises(
                ConfigError, match=r"shard-000000 cannot be written \(File too large\).* another directory"
            ):
                source.prepare(tmp_path / "out")

        assert in_child(child) == 0
        assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
        assert read_all(source.prepare(tmp_path / "out")) == source.samples

    @pytest.mark.parametrize("directory", ["/proc/prepared", "/dev/null/prepared"])
    def test_a_directory_that_cannot_be_made(self, source: Source, directory: str) -> None:
        with pytest.raises(ConfigError, match=f"{directory} cannot be written"):
            source.prepare(Path(directory))


def in_child(function: Callable[[], None], kill_after: float | None = None) -> int:
    """Run ``function`` in a fork of this process; its exit code, negative if a signal ended it."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def all_datasets(directory: Path) -> Iterator[PreparedDataset]:
    """Whatever can be opened in ``directory``, also what is not complete."""
    for manifest in [*directory.glob("*/manifest.json"), *directory.glob(".*/manifest.json")]:
        yield PreparedDataset(manifest.parent)


class TestKilled:
    def test_twenty_times_at_random(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "SHARD_BYTES", 400)
        slow, draw = Source(tmp_path / "source", Encode(seconds=0.002)), random.Random(7)
        began = time.perf_counter()
        slow.prepare(tmp_path / "whole")
        takes = time.perf_counter() - began
        out = tmp_path / "out"
        killed = 0
        for _ in range(20):
            code = in_child(lambda: slow.prepare(out) and None, kill_after=draw.uniform(0, 1.2 * takes))
            killed += code == -signal.SIGKILL
            for dataset in all_datasets(out) if out.exists() else ():
                assert read_all(dataset) == slow.samples
                dataset.verify()
            if code == 0:
                shutil.rmtree(out)
        assert killed >= 5
        assert read_all(slow.prepare(out)) == slow.samples
        assert [path.name for path in out.iterdir() if path.is_dir()] == [slow.prepare(out).directory.name]

    def test_its_workers_end_with_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "SHARD_BYTES", 400)
        slow, out = Source(tmp_path / "source", Encode(seconds=0.2)), tmp_path / "out"
        process = os.fork()
        if process == 0:
            slow.prepare(out, processes=2)
            os._exit(0)
        deadline = time.monotonic() + 60
        while not list(out.glob(".*.partial/shard-*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(process).children(recursive=True)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert len(children) >= 2
        assert psutil.wait_procs(children, timeout=20)[1] == []
        assert not list(out.glob("*/manifest.json"))
        slow.encode.seconds = 0.0
        assert read_all(slow.prepare(out)) == slow.samples

    def test_at_every_file_operation(self, source: Source, tmp_path: Path) -> None:
        """Python reports each of them before it happens; the process kills itself at the n-th."""
        out = tmp_path / "out"
        out.mkdir()
        events = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree", "os.truncate")

        def killed_at(operation: int) -> Callable[[], None]:
            def child() -> None:
                seen = 0

                def hook(event: str, arguments: tuple[Any, ...]) -> None:
                    nonlocal seen
                    if event in events and str(arguments[0]).startswith(str(out)):
                        seen += 1
                        if seen == operation:
                            os.kill(os.getpid(), signal.SIGKILL)

                sys.addaudithook(hook)
                source.prepare(out)

            return child

        complete, operation = 0, 0
        while (code := in_child(killed_at(operation := operation + 1))) == -signal.SIGKILL:
            found = [dataset for dataset in all_datasets(out) if not dataset.directory.name.startswith(".")]
            for dataset in all_datasets(out):  # complete if it has a manifest, also under its first name
                assert read_all(dataset) == source.samples
            complete += len(found)
            shutil.rmtree(out)
            out.mkdir()
        assert code == 0
        assert operation > 15 and 0 < complete < operation / 2

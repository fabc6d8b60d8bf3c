"""The manifest: what is changed in it or in a file is noticed, down to a digit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_trainer.checkpoint.protocol.file_records import FileRecord, StoredFile, find_damage, partial_checksum
from ds_trainer.checkpoint.protocol.file_writer import CheckpointFileWriter
from ds_trainer.checkpoint.protocol.manifest import MANIFEST_FILE, BrokenCheckpoint, Manifest, records_by_name
from tests.support.checkpoints import METADATA, save


def manifest(**changes: object) -> Manifest:
    values = {"step": 3, "generation": 1, "save_id": "a", "written": 0.0, "versions": {}, "files": {}, **METADATA}
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def test_checksums_survive_a_round_trip(tmp_path: Path) -> None:
    files = {f"{crc:x}": FileRecord(f"{crc:x}", 10, crc) for crc in (0, 7, 0x0012_3456, 0xFFFF_FFFF)}
    manifest(files=files).write(CheckpointFileWriter(tmp_path))
    assert Manifest.read(tmp_path).files == files


def test_any_change_of_the_manifest_is_detected(tmp_path: Path) -> None:
    path = save(tmp_path, 3) / MANIFEST_FILE
    text = path.read_text()
    for changed in (text.replace('"step": 3', '"step": 4'), text.replace('"step": 3', '"step":  3'), text[:-1]):
        assert changed != text
        path.write_text(changed)
        with pytest.raises(BrokenCheckpoint, match="has changed since it was written"):
            Manifest.read(path.parent)
    path.write_text(text)
    assert Manifest.read(path.parent).step == 3


@pytest.mark.parametrize("changes", [{"format": 2}, {"writer": "another"}], ids=str)
def test_a_manifest_of_another_format_is_rejected(changes: dict[str, object], tmp_path: Path) -> None:
    manifest(**changes).write(CheckpointFileWriter(tmp_path))
    with pytest.raises(BrokenCheckpoint, match="Use the version that wrote it"):
        Manifest.read(tmp_path)


def test_two_files_with_the_same_name_are_rejected() -> None:
    with pytest.raises(ValueError, match="two ranks wrote the same file: a"):
        records_by_name([FileRecord("a", 1, 1), FileRecord("b", 1, 1), FileRecord("a", 1, 1)])


def test_layouts_are_compared_by_sizes_stage_and_precision() -> None:
    one = manifest()
    assert one.same_layout({"world_size": 1}, 0, "fp32")
    for other in (({"world_size": 2}, 0, "fp32"), ({"world_size": 1}, 1, "fp32"), ({"world_size": 1}, 0, "bf16")):
        assert not one.same_layout(*other)


def written(directory: Path, *chunks: bytes) -> FileRecord:
    files = CheckpointFileWriter(directory)
    with files.create("file") as stream:
        for chunk in chunks:
            stream.write(chunk)
    return files.records[0]


def test_a_file_is_compared_by_size_and_content(tmp_path: Path) -> None:
    record = written(tmp_path, b"first ", b"second")
    path = tmp_path / "file"
    assert find_damage(tmp_path, record) is None
    for content, same, without_reading in (
        (b"first sec0nd", "is damaged", False),
        (b"first second ", "has 13 bytes instead of 12", True),
        (b"first secx", "has 10 bytes instead of 12", True),
    ):
        path.write_bytes(content)
        assert same in str(find_damage(tmp_path, record))
        assert (find_damage(tmp_path, record, compare_checksum=False) is not None) is without_reading
    path.unlink()
    assert "is missing" in str(find_damage(tmp_path, record))


def test_parts_of_a_checksum_differ(tmp_path: Path) -> None:
    written(tmp_path, b"first half, other one!")
    checksums = [partial_checksum(tmp_path / "file", 22, index, 2) for index in (0, 1)]
    (tmp_path / "other").mkdir()
    written(tmp_path / "other", b"first half, other two!")
    other_checksums = [partial_checksum(tmp_path / "other" / "file", 22, index, 2) for index in (0, 1)]
    assert checksums[0] == other_checksums[0] and checksums[1] != other_checksums[1]


def test_only_identical_files_are_linked(tmp_path: Path) -> None:
    """One of the same size with another beginning has been written since."""
    record = written(tmp_path, b"head and the rest")
    files = CheckpointFileWriter(tmp_path)
    assert not files.link("no", StoredFile(tmp_path / "file", record, b"HEAD"))
    assert not files.link("no", StoredFile(tmp_path / "file", record._replace(size=3), b"head"))
    assert not files.link("no", StoredFile(tmp_path / "gone", record, b"head"))
    assert files.link("yes", StoredFile(tmp_path / "file", record, b"head"))
    assert (tmp_path / "yes").samefile(tmp_path / "file") and files.records == [record]


def test_the_digest_is_the_last_entry() -> None:
    assert list(json.loads(manifest().to_json()))[-1] == "digest"

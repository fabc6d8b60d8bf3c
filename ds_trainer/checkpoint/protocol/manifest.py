"""The manifest of a checkpoint: its step, the run that wrote it, and every file with size and checksum.

The manifest is written last, so a directory without an intact manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ds_trainer.checkpoint.protocol.file_records import FileRecord
from ds_trainer.checkpoint.protocol.file_writer import CheckpointFileWriter
from ds_trainer.utils.errors import ConfigError, listed
from ds_trainer.utils.files import read_with_digest, text_with_digest

MANIFEST_FILE = "manifest.json"
WRITER = "ds_trainer"
FORMAT = 1
SHARDS, DEEPSPEED = "pieces", "deepspeed"
"""How the engine's state is stored: as shards that any layout can read (format 1 calls them pieces), or as DeepSpeed
wrote it."""


class BrokenCheckpoint(ConfigError):
    """A directory is not a checkpoint, or is damaged."""


@dataclass(frozen=True)
class Manifest:
    """The facts about a checkpoint.

    Attributes:
        step: optimizer steps done.
        generation: 1 + that of the newest checkpoint that was already in the directory. Orders checkpoints; steps do
            not, because a new run in an old directory starts at step 0.
        save_id: identifies the save; the same in the directories of all nodes.
        node, nodes: with ``save_on_each_node``, the index of this directory and the number of directories; else 0, 1.
        layout: sizes of the axes, and ``world_size``.
        zero_stage: the stage of the engine that wrote it.
        precision: type of the weights: bf16, fp16 or fp32.
        only_model: it holds weights only and cannot be resumed from.
        engine: how the engine's state is stored: :data:`SHARDS` or :data:`DEEPSPEED`.
        arguments: SHA-256 of the training arguments as JSON.
        written: seconds since 1970.
        versions: the versions of this package, torch, deepspeed and python.
        files: records by name.
        writer, format: the package that wrote it, and the version of its format.
    """

    step: int
    generation: int
    save_id: str
    layout: Mapping[str, int]
    zero_stage: int
    precision: str
    arguments: str
    written: float
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]
    only_model: bool = False
    engine: str = SHARDS
    node: int = 0
    nodes: int = 1
    writer: str = WRITER
    format: int = FORMAT

    def to_json(self) -> str:
        """Returns the manifest as text. Its last entry is a digest of all others, so that damage to it is found."""
        values = {**asdict(self), "files": {n: [r.size, f"{r.crc32:08x}"] for n, r in sorted(self.files.items())}}
        return text_with_digest(values, indent=1)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Returns the manifest in ``directory``.

        Raises:
            BrokenCheckpoint: it is missing or damaged, or has a format that this version does not read.
        """
        path = directory / MANIFEST_FILE
        try:
            values = read_with_digest(path, indent=1)
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{directory} is not a complete checkpoint: it has no {MANIFEST_FILE}.") from None
        except OSError as error:
            raise BrokenCheckpoint(f"{path} cannot be read ({error.strerror or error}).") from None
        if values is None:
            raise BrokenCheckpoint(f"{directory} is damaged: {MANIFEST_FILE} has changed since it was written.")
        if values.get("writer") != WRITER or values.get("format") != FORMAT:
            raise BrokenCheckpoint(
                f"{directory} has the format {values.get('format')} of {values.get('writer')}; this version of "
                f"{WRITER} reads format {FORMAT}. Use the version that wrote it: {values.get('versions')}."
            )
        files = {name: FileRecord(name, size, int(crc32, 16)) for name, (size, crc32) in values.pop("files").items()}
        return cls(files=files, **values)

    def write(self, writer: CheckpointFileWriter) -> None:
        """Write the manifest; call this after all other files are written."""
        with writer.create(MANIFEST_FILE) as stream:
            stream.write(self.to_json().encode())

    def check_resumable(self, path: Path) -> None:
        """Raise :class:`ConfigError` if the checkpoint at ``path`` holds weights only."""
        if self.only_model:
            raise ConfigError(
                f"{path} holds weights only (save_only_model=True when it was saved) and cannot be resumed from. "
                f"Start a new run from its weights with start_from_weights={str(path)!r}."
            )

    def same_layout(self, layout: Mapping[str, int], zero_stage: int, precision: str) -> bool:
        """Returns whether the checkpoint was written in this layout, ZeRO stage and precision."""
        return (dict(self.layout), self.zero_stage, self.precision) == (dict(layout), zero_stage, precision)


def versions() -> dict[str, str]:
    """Returns the versions that may matter when the checkpoint is read later."""
    result = {"python": platform.python_version()}
    for name in ("ds-trainer", "torch", "deepspeed"):
        try:
            result[name] = version(name)
        except PackageNotFoundError:  # for example, run from a source tree
            result[name] = "unknown"
    return result


def arguments_digest(text: str) -> str:
    """Returns a digest that identifies arguments serialized as ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()


def records_by_name(records: Sequence[FileRecord]) -> dict[str, FileRecord]:
    """Returns ``records`` by name.

    Raises:
        ValueError: two ranks wrote a file of the same name.
    """
    by_name = {record.name: record for record in records}
    if len(by_name) != len(records):
        several = sorted(name for name, number in Counter(record.name for record in records).items() if number > 1)
        raise ValueError(f"two ranks wrote the same file: {listed(several)}")
    return by_name

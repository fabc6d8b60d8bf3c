"""The manifest of a checkpoint: what it is, who wrote it, and every file in it with size and checksum.

A directory without an intact manifest is no checkpoint: the manifest is the last file that is written.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ds_trainer.checkpoint.protocol.files import CheckpointFiles, FileRecord
from ds_trainer.utils.errors import ConfigError

MANIFEST_FILE = "manifest.json"
WRITER = "ds_trainer"
FORMAT = 1
PIECES, DEEPSPEED = "pieces", "deepspeed"
"""How the engine's state is kept: as pieces that any layout reads, or as DeepSpeed wrote it."""


class BrokenCheckpoint(ConfigError):
    """A directory is no checkpoint, or is damaged."""


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint.

    Attributes:
        step: optimizer steps done.
        generation: 1 + that of the newest checkpoint that was in the directory before. Orders checkpoints; their steps
            do not, where a run began anew in an old directory.
        save_id: of the save; the same in the directories of all nodes.
        node, nodes: with ``save_on_each_node``: whose part this is, of how many; else 0 of 1.
        layout: sizes of the axes, ``world_size`` among them.
        zero_stage: of the engine that wrote it.
        precision: type of the weights: bf16, fp16 or fp32.
        only_model: it holds weights only, so that nothing can be resumed from it.
        engine: ``"pieces"``, or ``"deepspeed"`` where its state is as DeepSpeed wrote it.
        arguments: SHA-256 of the training arguments as JSON.
        written: seconds since 1970.
        versions: of this package, torch, deepspeed and python.
        files: by name.
        writer, format: that this package wrote it, in which form.
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
    engine: str = PIECES
    node: int = 0
    nodes: int = 1
    writer: str = WRITER
    format: int = FORMAT

    def to_json(self) -> str:
        """As text; its last entry is a digest of all others, so that damage of the manifest itself is seen."""
        values = {**asdict(self), "files": {n: [r.size, f"{r.crc32:08x}"] for n, r in sorted(self.files.items())}}
        return _text({**values, "digest": _digest(values)})

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest in ``directory``.

        Raises:
            BrokenCheckpoint: there is none, it is damaged, or a newer version of this package wrote it.
        """
        path = directory / MANIFEST_FILE
        try:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text)
            whole = text == _text(values)
            whole = values.pop("digest") == _digest(values) and whole
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{directory} is no complete checkpoint: it has no {MANIFEST_FILE}.") from None
        except OSError as error:
            raise BrokenCheckpoint(f"{path} cannot be read ({error.strerror or error}).") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise BrokenCheckpoint(f"{directory} is damaged: {MANIFEST_FILE} is not what was written.")
        if values.get("writer") != WRITER or values.get("format") != FORMAT:
            raise BrokenCheckpoint(
                f"{directory} has the format {values.get('format')} of {values.get('writer')}; this version of "
                f"{WRITER} reads format {FORMAT}. Use the version that wrote it: {values.get('versions')}."
            )
        files = {name: FileRecord(name, size, int(crc32, 16)) for name, (size, crc32) in values.pop("files").items()}
        return cls(files=files, **values)

    def write(self, files: CheckpointFiles) -> None:
        """Write it; after all other files."""
        with files.create(MANIFEST_FILE) as stream:
            stream.write(self.to_json().encode())

    def same_layout(self, layout: Mapping[str, int], zero_stage: int, precision: str) -> bool:
        """Whether ranks of this layout, stage and precision stand as those did which wrote it."""
        return (dict(self.layout), self.zero_stage, self.precision) == (dict(layout), zero_stage, precision)


def versions() -> dict[str, str]:
    """Of what may matter to who reads a checkpoint later."""
    found = {"python": platform.python_version()}
    for name in ("ds-trainer", "torch", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # from a source tree, say
            found[name] = "unknown"
    return found


def arguments_digest(text: str) -> str:
    """What identifies arguments that are written out as ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()


def records_by_name(records: Sequence[FileRecord]) -> dict[str, FileRecord]:
    """``records`` by name.

    Raises:
        ValueError: two ranks wrote a file of the same name.
    """
    found = {record.name: record for record in records}
    if len(found) != len(records):
        names = [record.name for record in records]
        raise ValueError(f"written twice: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    return found


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

"""The manifest of a prepared dataset: what it was made from, and every file with size and checksum.

It is written after all other files, and has no times, paths or host names: the same content gives the same manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_trainer.samples.prepared.block_file import BlockFileRecord, DamagedDataset, writing
from ds_trainer.utils.files import flush, read_with_digest, text_with_digest

MANIFEST_FILE = "manifest.json"
LENGTHS_FILE, OFFSETS_FILE = "lengths", "offsets"
WRITER = "ds_trainer.data.prepared"
FORMAT = 1


class ShardRecord(NamedTuple):
    """One shard.

    Attributes:
        number: the position among all shards; gives the file name.
        samples: number of samples.
        tokens: their tokens.
        masked: whether some tokens are not trained on, so that the shard has a mask.
        size, checksum: what is known of the file (:class:`~ds_trainer.samples.prepared.block_file.BlockFileRecord`).
        images: bytes of the images of the samples; 0: no sample has any.
    """

    number: int
    samples: int
    tokens: int
    masked: bool
    size: int
    checksum: int
    images: int = 0

    @property
    def file_name(self) -> str:
        """In the directory of the dataset."""
        return shard_file_name(self.number)

    @property
    def file(self) -> BlockFileRecord:
        """Size and checksum."""
        return BlockFileRecord(self.size, self.checksum)


def shard_file_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:06d}"


@dataclass(frozen=True)
class DatasetManifest:
    """The facts about a prepared dataset.

    Attributes:
        key: SHA-256 of everything that decides the samples (:mod:`ds_trainer.samples.prepared.key`).
        content: what the key was computed from, to be read by people.
        dtype: numpy name of the type of tokens.
        trained_tokens: tokens that are targets; the first one of a sample is none, as nothing predicts it.
        counts: ``records`` that were read, ``dropped`` ones that gave no sample, ``samples``, ``untrained`` ones
            without a target, and what ``encode`` noticed.
        lengths: record of the file with the tokens of every sample, int32 ``[samples]``.
        offsets: record of the file with the first token of every sample, counted over all shards, int64 ``[samples]``.
        shards: the shards that have samples, in order.
    """

    key: str
    content: Mapping[str, Any]
    dtype: str
    trained_tokens: int
    counts: Mapping[str, int]
    lengths: BlockFileRecord
    offsets: BlockFileRecord
    shards: tuple[ShardRecord, ...]

    @property
    def samples(self) -> int:
        """Samples of all shards."""
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Size on disk, without the manifest."""
        return sum(file.size_on_disk for file in (self.lengths, self.offsets, *(shard.file for shard in self.shards)))

    def to_json(self) -> str:
        """The manifest as text. Its last entry is a digest of all others."""
        return text_with_digest({"writer": WRITER, "format": FORMAT, **vars(self)})

    def write(self, directory: Path) -> None:
        """Write the manifest to ``directory`` and flush it to the disk.

        Raises:
            ConfigError: it cannot be written.
        """
        path = directory / MANIFEST_FILE
        with writing(path), path.open("x", encoding="utf-8") as stream:
            stream.write(self.to_json())
            stream.flush()
            flush(stream.fileno())

    @classmethod
    def read(cls, directory: Path) -> DatasetManifest:
        """The manifest in ``directory``.

        Raises:
            DamagedDataset: it is missing or damaged, or has a format that this version does not read.
        """
        path = directory / MANIFEST_FILE
        try:
            values = read_with_digest(path)
        except FileNotFoundError:
            raise DamagedDataset(f"{directory} has no complete prepared dataset: no {MANIFEST_FILE}.") from None
        except OSError as error:
            raise DamagedDataset(f"{path} cannot be read ({error.strerror or error}).") from None
        if values is None:
            raise DamagedDataset(f"{path} has changed since it was written.")
        writer, version = values.pop("writer", None), values.pop("format", None)
        if (writer, version) != (WRITER, FORMAT):
            raise DamagedDataset(
                f"{path} has the format {version} of {writer}; this version reads {FORMAT} of {WRITER}."
            )
        shards = tuple(ShardRecord(*shard) for shard in values.pop("shards"))
        for name in ("lengths", "offsets"):
            values[name] = BlockFileRecord(*values[name])
        return cls(shards=shards, **values)

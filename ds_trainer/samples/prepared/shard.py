"""One shard: the samples of some records, in one file.

Its sections: tokens (uint16 or uint32); a mask (one bit per token: trained on or not), absent if all are trained on;
the images of each sample (JSON) and where each of these lists ends (int64), absent if no sample has any; for each
sample the number at the end of its source (int64; -1: none) and the index of what precedes that (int32) in a
table (JSON), which is the last section.

A mask of one bit takes 1/16 or 1/32 of the tokens, and the position of a token is that of its bit. Runs of trained
tokens would be smaller, but need an offset per sample to be found.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ds_trainer.samples.prepared.block_file import BlockFile, BlockWriter, Bytes
from ds_trainer.samples.prepared.manifest import ShardRecord, shard_file_name
from ds_trainer.utils.errors import ConfigError

if TYPE_CHECKING:
    from ds_trainer.samples.sources.record import Record

IGNORED = -100
_KEYS = ("input_ids", "labels")
_IMAGES = "images"
_MOST_PROBLEMS = 20
_NOTED_EVERY = 256  # samples

Encoded = Mapping[str, Any]
Encode = Callable[["Record"], Any]
"""Gives the sample of a record, an iterable of samples, None, or an object with ``samples`` and ``notices`` (names that
are counted)."""
ReadRecords = Callable[[], Iterable["Record"]]


@dataclass
class ShardResult:
    """What a worker reports about a shard.

    Attributes:
        record: its entry in the manifest.
        lengths: tokens of each sample, int32 ``[samples]``.
        trained_tokens, counts: see :class:`~ds_trainer.samples.prepared.manifest.DatasetManifest`.
        seconds: CPU time of reading, encoding and writing.
        problems: what is wrong with records; the shard is of no use if there are any.
    """

    record: ShardRecord
    lengths: npt.NDArray[np.int32]
    trained_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def token_dtype(vocab_size: int | None) -> str:
    """Name of the smallest type for ids below ``vocab_size``; None: unknown."""
    return "uint16" if vocab_size is not None and vocab_size <= 2**16 else "uint32"


def write_shard(
    directory: Path,
    number: int,
    reads: Iterable[ReadRecords],
    encode: Encode,
    vocab_size: int | None,
    note: Callable[[int], None] = lambda tokens: None,
) -> ShardResult:
    """Encode records and write the samples to a new file, flushed to the disk.

    Args:
        directory: the directory of the dataset.
        number: the position of the shard, which names the file.
        reads: each opens some of the records.
        encode: gives the samples of a record (:data:`Encode`).
        vocab_size: all ids are below it.
        note: is told the tokens of some samples now and then, for a progress bar.

    Raises:
        ConfigError: the file cannot be written.
        RuntimeError: ``encode`` raised anything but a ConfigError.
    """
    began = time.process_time()
    writer = BlockWriter(directory / shard_file_name(number))
    try:
        samples = _Samples(writer, np.dtype(token_dtype(vocab_size)).newbyteorder("<"), vocab_size, note)
        problems: list[str] = []
        for read in reads:
            problems += _encode_all(read, encode, samples, _MOST_PROBLEMS - len(problems))
            if len(problems) >= _MOST_PROBLEMS:
                break
        result = samples.finish(number)
    finally:
        writer.close()
    result.problems = problems
    result.seconds = time.process_time() - began
    return result


def _encode_all(read: ReadRecords, encode: Encode, samples: _Samples, most: int) -> list[str]:
    problems: list[str] = []
    try:
        for record in read():
            try:
                encoded = encode(record)
                samples.counts.update(getattr(encoded, "notices", ()))
                made = _samples_of(encoded)
                before = samples.counts["samples"]
                for sample in made:
                    samples.add(record.source, sample)
                samples.counts["records"] += 1
                samples.counts["dropped"] += samples.counts["samples"] == before
            except ConfigError as error:
                problems += error.problems
                if len(problems) >= most:
                    break
            except Exception as error:
                raise RuntimeError(f"{record.source} cannot be encoded: {type(error).__name__}: {error}") from error
    except ConfigError as error:  # from the reader, which cannot go on
        problems += error.problems
    return problems


def _samples_of(encoded: Any) -> list[Encoded]:
    encoded = getattr(encoded, "samples", encoded)
    if encoded is None:
        return []
    return [encoded] if isinstance(encoded, Mapping) else list(encoded)


class _Samples:
    """The samples of a shard while it is written: tokens go to the file, the rest is kept until the end."""

    def __init__(
        self, writer: BlockWriter, dtype: np.dtype[Any], vocab_size: int | None, note: Callable[[int], None]
    ) -> None:
        self._writer, self._dtype, self._note = writer, dtype, note
        self._limit = int(np.iinfo(np.dtype(token_dtype(vocab_size))).max) + 1 if vocab_size is None else vocab_size
        self._trained: list[npt.NDArray[np.bool_]] = []
        self._lengths: list[int] = []
        self._sources = _Sources()
        self._images = _Images()
        self._noted = self._targets = 0
        self.counts: Counter[str] = Counter()

    def add(self, source: str, sample: Encoded) -> None:
        ids, trained = self._checked(source, sample)
        if not len(ids):
            return
        self._writer.write(ids.astype(self._dtype).tobytes())
        self._trained.append(trained)
        self._lengths.append(len(ids))
        targets = int(np.count_nonzero(trained[1:]))
        self._targets += targets
        self.counts["samples"] += 1
        self.counts["untrained"] += not targets
        self._sources.add(source)
        self._images.add(sample.get(_IMAGES) or ())
        self._noted += len(ids)
        if len(self._lengths) % _NOTED_EVERY == 0:
            self._tell()

    def finish(self, number: int) -> ShardResult:
        trained = np.concatenate(self._trained) if self._trained else np.empty(0, np.bool_)
        masked = not trained.all()
        if masked:
            self._writer.write(np.packbits(trained, bitorder="little").tobytes())
        images = list(self._images.sections())
        for section in (*images, *self._sources.sections()):
            self._writer.write(section)
        file = self._writer.finish()
        self._tell()
        lengths = np.asarray(self._lengths, np.int32)
        image_bytes = sum(map(len, images))
        record = ShardRecord(
            number=number,
            samples=len(lengths),
            tokens=len(trained),
            masked=masked,
            size=file.size,
            checksum=file.checksum,
            images=image_bytes,
        )
        return ShardResult(record, lengths, self._targets, self.counts)

    def _tell(self) -> None:
        self._note(self._noted)
        self._noted = 0

    def _checked(self, source: str, sample: Encoded) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Ids and which of them are trained on."""
        if {*sample} - {_IMAGES} != {*_KEYS}:
            raise ConfigError(
                f"{source}: a prepared sample has {' and '.join(_KEYS)}, but encode returned {', '.join(sample)}."
            )
        ids, labels = (np.asarray(sample[key]) for key in _KEYS)
        if ids.ndim != 1 or ids.shape != labels.shape:
            raise ConfigError(
                f"{source}: input_ids of shape {list(ids.shape)} and labels of shape {list(labels.shape)} must be one "
                "number per token."
            )
        if not len(ids):
            return ids, np.empty(0, np.bool_)
        if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= self._limit:
            raise ConfigError(
                f"{source}: the token ids are {ids.dtype} from {ids.min()} to {ids.max()}, but the tokenizer has ids "
                f"from 0 to {self._limit - 1}."
            )
        trained = labels != IGNORED
        if (labels[trained] != ids[trained]).any():
            raise ConfigError(f"{source}: a label is neither its token nor {IGNORED}; such labels cannot be prepared.")
        return ids, trained


class _Sources:
    """Where each sample comes from: ``file:12`` as the number 12 and the index of ``file:`` in a table."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._prefixes: list[int] = []
        self._table: dict[str, int] = {}

    def add(self, source: str) -> None:
        match = re.search(r"(?:0|[1-9]\d{0,17})$", source, re.ASCII)
        prefix, number = (source, -1) if match is None else (source[: match.start()], int(match.group()))
        self._numbers.append(number)
        self._prefixes.append(self._table.setdefault(prefix, len(self._table)))

    def sections(self) -> Iterator[bytes]:
        yield np.asarray(self._numbers, "<i8").tobytes()
        yield np.asarray(self._prefixes, "<i4").tobytes()
        yield json.dumps(list(self._table), ensure_ascii=False).encode("utf-8", "surrogatepass")


class _Images:
    """The images of each sample: paths, or texts with their content."""

    def __init__(self) -> None:
        self._lists: list[bytes] = []

    def add(self, images: Sequence[str]) -> None:
        self._lists.append(json.dumps(list(images)).encode() if images else b"")

    def sections(self) -> Iterator[bytes]:
        if any(self._lists):
            yield b"".join(self._lists)
            yield np.cumsum([len(images) for images in self._lists]).astype("<i8").tobytes()


class Shard:
    """Reads a shard.

    Args:
        directory: the directory of the dataset.
        record: its entry in the manifest.
        dtype: type of tokens.
    """

    def __init__(self, directory: Path, record: ShardRecord, dtype: str) -> None:
        self.file = BlockFile(directory / record.file_name, record.file)
        self._record, self._dtype = record, np.dtype(dtype).newbyteorder("<")
        self._mask = record.tokens * self._dtype.itemsize
        self._images = self._mask + (-(-record.tokens // 8) if record.masked else 0)
        self._numbers = self._images + record.images
        self._prefixes = self._numbers + 8 * record.samples
        self._table = self._prefixes + 4 * record.samples

    def sample(self, start: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ids and labels of ``length`` tokens from the token ``start`` on, int64 ``[length]`` each."""
        size = self._dtype.itemsize
        ids = self.file.read(start * size, (start + length) * size).view(self._dtype).astype(np.int64)
        if not self._record.masked:
            return ids, ids.copy()
        first, shift = divmod(start, 8)
        mask: Bytes = self.file.read(self._mask + first, self._mask + (start + length + 7) // 8)
        trained = np.unpackbits(mask, bitorder="little")[shift : shift + length]
        return ids, np.where(trained, ids, IGNORED)

    @property
    def has_images(self) -> bool:
        """Whether some sample has images."""
        return self._record.images > 0

    def images(self, index: int) -> list[str]:
        """The images of the sample ``index`` of this shard: paths, or contents as data URIs."""
        ends = self._numbers - 8 * self._record.samples
        bounds = self.file.read(ends + 8 * max(index - 1, 0), ends + 8 * (index + 1)).view("<i8")
        first = int(bounds[0]) if index else 0
        listed = self.file.read(self._images + first, self._images + int(bounds[-1])).tobytes()
        return json.loads(listed) if listed else []

    def source(self, index: int) -> str:
        """Where the sample ``index`` of this shard comes from, as its record said."""
        number = int(self.file.read(self._numbers + 8 * index, self._numbers + 8 * index + 8).view("<i8")[0])
        prefix = int(self.file.read(self._prefixes + 4 * index, self._prefixes + 4 * index + 4).view("<i4")[0])
        table = self.file.read(self._table, self._record.size).tobytes().decode("utf-8", "surrogatepass")
        return json.loads(table)[prefix] + (str(number) if number >= 0 else "")

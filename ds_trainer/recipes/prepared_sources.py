"""The samples of sources, tokenized once: the records of files, in parts that several processes can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.encoding import BAD_LINE, RecordEncoder
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.prepared.prepare import NothingPrepared, prepare
from ds_trainer.samples.prepared.workers import Part
from ds_trainer.samples.sources.files import SourceFile
from ds_trainer.samples.sources.formats import RecordFormat
from ds_trainer.samples.sources.held_out import HeldOut
from ds_trainer.samples.sources.record import BadLine, BadLines, Record
from ds_trainer.samples.sources.source import Source, read_file
from ds_trainer.utils.errors import ConfigError, Problems, listed


def open_sources(spec: DataSpec, refusal: Callable[[RecordFormat], str | None]) -> tuple[list[Source], list[Source]]:
    """The sources of training and of evaluation, whose files are not among those of training.

    Args:
        spec: the section ``data`` of a recipe.
        refusal: says why samples of a format cannot be used; None: they can.

    Raises:
        ConfigError: paths match nothing, or samples cannot be used; lists all problems.
    """
    problems = Problems()
    held_out: set[Path] = set()
    opened: dict[str, list[Source]] = {"eval": [], "train": []}
    for split in ("eval", "train"):
        for key, entry in spec.sources(split):
            with problems.collecting():
                source = Source(entry, key, held_out if split == "train" else ())
                opened[split].append(source)
                if split == "eval":
                    held_out.update(file.path for file in source.files)
                format = source.find_format()
                reason = None if format is None else refusal(format)
                if reason is not None:
                    problems.add(f"{key}: {reason}")
    problems.raise_if_any()
    return opened["train"], opened["eval"]


@dataclass(frozen=True)
class FileRecords:
    """Opens the records of files of a source on one side of the split; can be pickled.

    Bad lines become records of their own on the side of training, so that they are counted, or refused all at once.

    Args:
        files: what to read.
        source: to which they belong.
        split: None: there is none.
        held_out: the side that is wanted.
    """

    files: tuple[SourceFile, ...]
    source: Source
    split: HeldOut | None
    held_out: bool

    def __call__(self) -> Iterator[Record]:
        """The records.

        Raises:
            ConfigError: the rest of a file cannot be read.
        """
        format, kind = self.source.format, self.source.spec.kind
        records = (record for file in self.files for record in read_file(file, format, kind))
        taken, limit = 0, self.source.spec.limit
        for record in records:
            if isinstance(record, BadLine):
                if not self.held_out:
                    yield _as_record(record)
                continue
            if self.split is None or self.split.takes(record) is self.held_out:
                yield record
            taken += 1
            if taken == limit:
                return


def _as_record(bad: BadLine) -> Record:
    if bad.whole_file:
        refused = BadLines("skip")  # which does not skip those either
        refused.add(bad)
        refused.check()
    return Record(bad.where, BAD_LINE, {"reason": f"{bad.reason}."})


def prepare_sources(
    sources: Sequence[Source],
    split: HeldOut | None,
    held_out: bool,
    encoder: RecordEncoder,
    identity: dict[str, Any],
    directory: str | Path,
) -> PreparedDataset:
    """The samples of ``sources`` on one side of the split, tokenized now or before.

    Raises:
        NothingPrepared: there is no sample.
        ConfigError: there are bad lines or records that cannot be encoded; lists up to 20.
    """
    try:
        return _prepare(sources, split, held_out, encoder, identity, directory)
    except NothingPrepared as error:
        if split is None or held_out or error.records:
            raise
        if not any(True for source in sources for _ in source.read(BadLines("skip"))):
            names = listed(file.path.name for source in sources for file in source.files)
            raise ConfigError(f"{names}: there are no records in it.") from error
        raise ConfigError(
            f"data.held_out takes all of the records ({split.portion:.3g} of them are wanted). Equal "
            "records are on the same side; give a smaller share, or a number of samples."
        ) from error


def _prepare(
    sources: Sequence[Source],
    split: HeldOut | None,
    held_out: bool,
    encoder: RecordEncoder,
    identity: dict[str, Any],
    directory: str | Path,
) -> PreparedDataset:
    parts, tokenizer = [], encoder.encoder.tokenizer
    for source in sources:
        sizes = [_size(file.path) for file in source.files]
        groups: list[tuple[tuple[SourceFile, ...], int]]
        if source.spec.limit is None:
            groups = [((file,), size) for file, size in zip(source.files, sizes, strict=True)]
        else:  # the limit counts over all files
            groups = [(tuple(source.files), sum(sizes))]
        parts += [Part(size, FileRecords(files, source, split, held_out)) for files, size in groups]
    reading: dict[str, Any] = {
        "sources": [[source.format_name, source.spec.kind, source.spec.limit, len(source.files)] for source in sources],
        "formats": [sorted({file.format for file in source.files}) for source in sources],
        "split": None if split is None else [split.limit, held_out],
    }
    if encoder.encoder.identity():  # samples have paths of images, which are relative to the files
        reading["directories"] = [str(file.path.parent.resolve()) for source in sources for file in source.files]
    return prepare(
        parts,
        encoder,
        directory,
        files=[path for source in sources for path in source.paths()],
        identity={**identity, "reading": reading},
        vocab_size=max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1),  # some vocabularies have gaps
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(part.stat().st_size for part in path.rglob("*"))

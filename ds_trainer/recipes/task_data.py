"""The samples of a task in Arrow files: written once by one process of a machine, then memory-mapped by all.

The files are found again by their content: digests of the source files, what decides how they are read, and the code
that reads them (:mod:`ds_trainer.samples.prepared.key`). Processes that wait do so without a collective
(:mod:`ds_trainer.samples.prepared.once`). A directory is written beside its name and renamed last.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.prepared_sources import open_sources
from ds_trainer.samples.chat.problems import unread_lines
from ds_trainer.samples.prepared.block_file import writing
from ds_trainer.samples.prepared.key import (
    check_unchanged,
    content_key,
    digest_of_code,
    file_states,
    known_digest_of_files,
)
from ds_trainer.samples.prepared.once import Waiting, WriterHeartbeat, made_once, published
from ds_trainer.samples.prepared.prepare import default_directory
from ds_trainer.samples.sources.formats import RecordFormat
from ds_trainer.samples.sources.held_out import HeldOut
from ds_trainer.samples.sources.mixture import Mixture
from ds_trainer.samples.sources.record import BadLine, BadLines, BadRecord, Record
from ds_trainer.samples.sources.rows import SourceRow, read_rows
from ds_trainer.samples.sources.source import Source
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import flush, read_json, user_path, write_json
from ds_trainer.utils.logging import EVERY_RANK, get_logger

logger = get_logger(__name__)

_BATCH = 1000  # rows that are in memory at once
_FACTS = "facts.json"
_MOST_NAMES = 50  # of keys that no rule has read


@dataclass(frozen=True)
class Reading:
    """How the samples of a task are read.

    Attributes:
        task: its name, for messages.
        kind: the task takes records of this kind.
        row: the columns of a record.
        from_row: makes a record of a row of a file; default: what the row's keys say.
        code: the module that ``row`` and ``from_row`` are in.
        options: what else decides them.
    """

    task: str
    kind: str
    row: Callable[[Record], dict[str, Any]]
    code: str
    from_row: Callable[[SourceRow], Record] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskData:
    """The samples of a task.

    Attributes:
        train: what is trained on, a ``datasets.Dataset``.
        eval: what is evaluated; None if there is nothing.
        bad_lines: that were left out.
        unread: keys that no rule has read, with the number of samples.
        directory: where the files are.
        of_sources: samples of each source of ``train``, one after the other, as they are in the files.
    """

    train: Any
    eval: Any
    bad_lines: int
    unread: Mapping[str, int]
    directory: Path
    of_sources: tuple[int, ...] = ()

    def samples(self) -> dict[str, int]:
        """Their numbers, for the report."""
        counts = {"train": len(self.train), "eval": 0 if self.eval is None else len(self.eval)}
        return {**counts, "bad_lines": self.bad_lines} if self.bad_lines else counts


def read_task_data(spec: DataSpec, reading: Reading, seed: int = 42) -> TaskData:
    """The samples of ``spec``, written by one process of each machine, or found as an earlier run left them.

    Args:
        spec: the section ``data`` of a recipe.
        reading: how its samples are read.
        seed: decides the choice of samples where sources have weights.

    Raises:
        ConfigError: files are missing, lines are bad, or records have another kind; lists all problems.
    """
    _import_datasets()
    train, evaluation = open_sources(spec, partial(_other_kind, reading))
    sources = {"train": train, "eval": evaluation}
    names = [str(path) for split in ("eval", "train") for source in sources[split] for path in source.paths()]
    root = user_path(spec.prepared_dir or default_directory(), f"data.prepared_dir={spec.prepared_dir}")
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
    states = file_states(names)
    digest = known_digest_of_files(names, states, root, os.cpu_count() or 1, Waiting())
    key, _ = content_key(digest, _identity(spec, reading, sources), "records")
    final = root / f"{key[:32]}.records"

    def make(heartbeat: WriterHeartbeat) -> TaskData:
        heartbeat.doing = f"reading the samples of task {reading.task}"
        if final.exists():
            logger.warning("%s is damaged; it is written again.", final, extra=EVERY_RANK)
        with published(final, lambda: _find(final) is not None) as directory:
            _Writer(spec, reading, sources).write(directory)
            check_unchanged(names, states)
        data = _find(final)
        if data is None:
            raise ConfigError(f"{final} was written, but cannot be read.")
        return data

    data = made_once(final, lambda: _find(final), make)
    if data.bad_lines:
        logger.warning("data: %s bad lines are left out (data.bad_lines: skip).", f"{data.bad_lines:,}")
    for line in unread_lines(data.unread):
        logger.info("data: %s", line)
    return _weighted(data, spec, sources["train"], seed)


def _weighted(data: TaskData, spec: DataSpec, sources: Sequence[Source], seed: int) -> TaskData:
    """The samples of an epoch where sources have weights: the same in every epoch, since a library keeps the order."""
    weights = [entry.weight for _, entry in spec.sources("train") if entry.weight is not None]
    if not weights:
        return data
    ends = list(accumulate(data.of_sources))
    ranges = [range(end - size, end) for end, size in zip(ends, data.of_sources, strict=True)]
    mixture = Mixture(ranges, weights, names=[source.name for source in sources], seed=seed, new_samples=False)
    for line in mixture.describe():
        logger.info("%s", line)
    return replace(data, train=data.train.select([mixture[index] for index in range(len(mixture))]))


def _other_kind(reading: Reading, format: RecordFormat) -> str | None:
    if reading.from_row is not None or format.kind == reading.kind:
        return None
    return f"task {reading.task} takes samples of the kind {reading.kind}, but these are {format.name}."


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("Recipes need datasets: pip install 'ds-trainer[hf]'.") from error
    return datasets


def _identity(spec: DataSpec, reading: Reading, sources: Mapping[str, list[Source]]) -> dict[str, Any]:
    shown = {
        split: [
            [source.format_name, source.spec.kind, source.spec.limit, source.spec.text_key, len(source.files)]
            for source in opened
        ]
        for split, opened in sources.items()
    }
    return {
        "task": [reading.kind, dict(reading.options)],
        "sources": shown,
        "split": [spec.held_out, spec.bad_lines],
        "code": digest_of_code("ds_trainer.samples.sources", __name__, reading.code, packages=("pyarrow",)),
    }


def _find(directory: Path) -> TaskData | None:
    """What is in ``directory``; None if there is nothing, or not all of it."""
    try:
        facts = read_json(directory / _FACTS)
        sizes = {name: (directory / name).stat().st_size for name in facts["bytes"]}
    except (OSError, ValueError, KeyError):
        return None
    if sizes != facts["bytes"]:
        return None
    load = _import_datasets().Dataset.from_file
    tables = {split: load(str(directory / f"{split}.arrow")) for split in ("train", "eval") if facts[split]}
    numbers = facts["bad_lines"], facts["unread"], directory, tuple(facts["of_sources"])
    return TaskData(tables["train"], tables.get("eval"), *numbers)


class _Writer:
    """Reads the sources twice: for the schema, which the first rows may not show, and to write."""

    def __init__(self, spec: DataSpec, reading: Reading, sources: Mapping[str, list[Source]]) -> None:
        self._spec, self._reading, self._sources = spec, reading, sources
        self._part: HeldOut | None = None
        self._unread: Counter[str] = Counter()

    def write(self, directory: Path) -> None:
        """Write the files.

        Raises:
            ConfigError: lists bad lines; or there is no sample.
        """
        bad = BadLines(self._spec.bad_lines)
        schemas: list[Any] = []
        held_out = self._spec.held_out
        if held_out is not None and held_out >= 1:
            records = (record for _, record, _ in self._rows("train", BadLines(self._spec.bad_lines)))
            try:
                self._part = HeldOut.count(int(held_out), records)
            except ConfigError as error:
                self._part = None
                problems = self._all_bad_lines()
                raise ConfigError(problems or error.problems) from error
        elif held_out is not None:
            self._part = HeldOut.share(held_out)
        counts = {"train": 0, "eval": 0}
        of_sources = [0] * len(self._sources["train"])
        for split in ("eval", "train"):
            for rows in _batches(self._of_split(split, bad, of_sources if split == "train" else None)):
                counts[split] += len(rows)
                schemas.append(_table(rows).schema)
        bad.check()
        if not counts["train"] or (self._spec.has_eval and not counts["eval"]):
            side = "train on" if not counts["train"] else "evaluate"
            raise ConfigError(f"data: there is no sample to {side}; the files have {counts['train']:,} for training.")
        schema = _unified(schemas)
        with writing(directory):
            for split in ("train", "eval"):
                if counts[split]:
                    _write_table(directory / f"{split}.arrow", self._of_split(split, BadLines("skip")), schema)
            sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
            unread = dict(self._unread.most_common(_MOST_NAMES))
            facts = {**counts, "of_sources": of_sources, "bad_lines": bad.count, "unread": unread, "bytes": sizes}
            write_json(directory / _FACTS, facts)

    def _all_bad_lines(self) -> list[str]:
        bad = BadLines(self._spec.bad_lines)
        for split in ("eval", "train"):
            for _ in self._of_split(split, bad):
                pass
        return bad.problems()

    def _of_split(self, split: str, bad: BadLines, counts: list[int] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of one side; ``counts`` gets the number of each source."""
        if split == "eval" and self._part is not None:
            yield from (row for _, record, row in self._rows("train", BadLines("skip")) if self._part.takes(record))
            return
        for number, record, row in self._rows(split, bad):
            if split == "eval" or self._part is None or not self._part.takes(record):
                if counts is not None:
                    counts[number] += 1
                    self._unread.update(record.unread)
                yield row

    def _rows(self, split: str, bad: BadLines) -> Iterator[tuple[int, Record, dict[str, Any]]]:
        """Number of the source, record, and columns, which are the same in all of them."""
        shape: dict[str, type] | None = None
        for number, source in enumerate(self._sources[split]):
            for record in _records(source, self._reading.from_row, bad):
                row = self._reading.row(record)
                columns = {name: type(value) for name, value in row.items()}
                shape = shape or columns
                if columns == shape:
                    yield number, record, row
                else:
                    bad.add(BadLine(record.source, f"has {_shown(columns)}, but the first sample has {_shown(shape)}"))


_TYPES = {str: "a text", list: "turns", float: "a number", int: "a number"}


def _shown(shape: Mapping[str, type]) -> str:
    return ", ".join(f"{name!r} ({_TYPES.get(kind, kind.__name__)})" for name, kind in shape.items())


def _records(source: Source, from_row: Callable[[SourceRow], Record] | None, bad: BadLines) -> Iterator[Record]:
    if from_row is None:
        yield from source.read(bad)
        return
    count = 0
    for file in source.files:
        for row in read_rows(file):
            if isinstance(row, BadLine):
                bad.add(row)
                continue
            try:
                record = from_row(row)
            except BadRecord as error:
                bad.add(BadLine(row.where, str(error)))
                continue
            count += 1
            if source.spec.limit is None or count <= source.spec.limit:  # the rest is read for its bad lines
                yield record


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    iterator = iter(rows)
    return iter(lambda: list(islice(iterator, _BATCH)), [])


def _table(rows: Iterable[dict[str, Any]], schema: Any = None) -> Any:
    import pyarrow as pa

    try:
        return pa.Table.from_pylist(list(rows), schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(f"data: the samples do not fit in one table: {error}") from error


def _unified(schemas: Iterable[Any]) -> Any:
    import pyarrow as pa

    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(f"data: the samples do not fit in one table: {error}") from error


def _write_table(path: Path, rows: Iterable[dict[str, Any]], schema: Any) -> None:
    import pyarrow as pa

    with open(path, "wb") as file:
        with pa.ipc.new_stream(file, schema) as writer:
            for part in _batches(rows):
                writer.write_table(_table(part, schema))
        file.flush()
        flush(file.fileno())

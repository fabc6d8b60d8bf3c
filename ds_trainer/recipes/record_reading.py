"""All records of a recipe's data at once, for tasks whose samples are few: preferences, and labeled texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ds_trainer.data.sources.bad_lines import BadLine, BadLines, BadRecord
from ds_trainer.data.sources.held_out import HeldOut
from ds_trainer.data.sources.record import Record
from ds_trainer.data.sources.rows import Row, read_rows
from ds_trainer.data.sources.source import Source
from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.utils.errors import ConfigError

FromRow = Callable[[Row], Record]


class Split(NamedTuple):
    """Records of training, and of evaluation; none if the recipe has no data for it."""

    train: list[Record]
    eval: list[Record]


def read_split(spec: DataSpec, kind: str, task: str, from_row: FromRow | None = None) -> Split:
    """The records of ``spec``, all of one kind. They are held in memory by every rank.

    Args:
        spec: the section ``data`` of a recipe.
        kind: of the records that the task takes.
        task: its name, for messages.
        from_row: makes a record of a row; default: what the row's keys say.

    Raises:
        ConfigError: files are missing, lines are bad, or records have another kind; lists all problems.
    """
    problems, bad = [], BadLines(spec.bad_lines)
    found: dict[str, list[Record]] = {"eval": [], "train": []}
    held_out: set[Path] = set()
    for split in ("eval", "train"):
        for key, entry in spec.sources(split):
            if entry.weight is not None:
                problems.append(f"{key}: task {task} takes all samples of all sources; remove weight.")
            try:
                source = Source(entry, key, held_out if split == "train" else ())
            except ConfigError as error:
                problems += error.problems
                continue
            if split == "eval":
                held_out.update(file.path for file in source.files)
            if from_row is not None:
                found[split] += _limited(_from_rows(source, from_row, bad), entry.limit)
                continue
            format = source.find_format()
            if format is not None and format.kind != kind:
                problems.append(f"{key}: task {task} takes samples of the kind {kind}, but these are {format.name}.")
                continue
            found[split] += source.read(bad)
    problems += bad.problems()
    if problems:
        raise ConfigError(problems)
    if spec.held_out is not None:
        records = found["train"]
        part = HeldOut.share(spec.held_out) if spec.held_out < 1 else HeldOut.count(int(spec.held_out), iter(records))
        found["eval"] = [record for record in records if part.takes(record)]
        found["train"] = [record for record in records if not part.takes(record)]
    if not found["train"] or (spec.has_eval and not found["eval"]):
        side = "train on" if not found["train"] else "evaluate"
        raise ConfigError(f"data: there is no sample to {side}; the files have {len(found['train']):,} for training.")
    return Split(found["train"], found["eval"])


def _from_rows(source: Source, from_row: FromRow, bad: BadLines) -> Iterator[Record]:
    for file in source.files:
        for row in read_rows(file):
            if isinstance(row, BadLine):
                bad.add(row)
                continue
            try:
                yield from_row(row)
            except BadRecord as error:
                bad.add(BadLine(row.where, str(error)))


def _limited(records: Iterator[Record], limit: int | None) -> list[Record]:
    """The first ``limit`` of ``records``; the others are read, too, so that all bad lines are found."""
    return list(records)[:limit]

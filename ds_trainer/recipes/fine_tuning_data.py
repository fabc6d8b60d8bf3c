"""The samples of a fine-tuning recipe: sources read, checked, split, tokenized, and mixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.sources.bad_lines import LISTED, BadLines
from ds_trainer.data.sources.held_out import HeldOut
from ds_trainer.data.sources.mixture import Mixture
from ds_trainer.data.sources.record import Record
from ds_trainer.data.sources.source import Source
from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.sample_store import SampleStore
from ds_trainer.utils.errors import ConfigError

Encode = Callable[[Record], Iterable[Mapping[str, Any]]]
_BY_LENGTH = ("group_by_length", "batch_rebalance")


@dataclass
class SourceFigures:
    """What became of a source.

    Attributes:
        name, kind, format: of the source and its samples.
        files, records: that were read, without bad lines.
        samples, tokens, trained_tokens: that are trained on (of evaluation data: evaluated).
        held_out: records that are evaluated.
        without_sample: records that gave none, because they are too long.
    """

    name: str
    kind: str
    format: str
    files: int
    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    held_out: int = 0
    without_sample: int = 0


@dataclass(frozen=True)
class FineTuningData:
    """The samples of a recipe.

    Attributes:
        train: of training, mixed.
        eval: of evaluation; None if there is none.
        sources, eval_sources: figures of each source.
        bad_lines: that were left out.
        lines: what was found, for the log.
    """

    train: Mixture
    eval: SampleStore | None
    sources: list[SourceFigures]
    eval_sources: list[SourceFigures]
    bad_lines: int
    lines: list[str]

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        tokens = sum(figures.tokens for figures in self.sources)
        trained = sum(figures.trained_tokens for figures in self.sources)
        return {
            "sources": [
                {**asdict(figures), "samples_per_epoch": samples, "repeats_per_epoch": repeats}
                for figures, samples, repeats in zip(
                    self.sources, self.train.samples, self.train.repeats(), strict=True
                )
            ],
            "eval_sources": [asdict(figures) for figures in self.eval_sources],
            "eval_samples": 0 if self.eval is None else len(self.eval),
            "eval_target_tokens": 0 if self.eval is None else self.eval.trained_tokens,
            "tokens": tokens,
            "trained_tokens": trained,
            "trained_share": trained / max(tokens, 1),
            "bad_lines": self.bad_lines,
        }


def open_sources(spec: DataSpec) -> tuple[list[Source], list[Source]]:
    """The sources of training and of evaluation, whose files are not among those of training.

    Raises:
        ConfigError: paths match nothing, or samples have a kind that cannot be trained on here; lists all problems.
    """
    problems: list[str] = []
    held_out: set[Path] = set()
    found: dict[str, list[Source]] = {"eval": [], "train": []}
    for split in ("eval", "train"):
        for key, entry in spec.sources(split):
            try:
                source = Source(entry, key, held_out if split == "train" else ())
            except ConfigError as error:
                problems += error.problems
                continue
            if split == "eval":
                held_out.update(file.path for file in source.files)
            found[split].append(source)
            format = source.find_format()
            if format is not None and format.kind == "preference":
                problems.append(
                    f"{key}: {format.name} are for preference training (DPO), not for this job. Set kind to messages, "
                    "or text_key, if the samples have those too."
                )
    if problems:
        raise ConfigError(problems)
    return found["train"], found["eval"]


class _Reading:
    """Reads all sources, tokenizes their records, and collects every problem before it is raised."""

    def __init__(self, spec: DataSpec, encode: Encode) -> None:
        self.bad = BadLines(spec.bad_lines)
        self.problems: list[str] = []
        self.failed = 0
        self._encode = encode

    def add(self, record: Record, store: SampleStore) -> bool:
        """Add the samples of ``record`` to ``store``; False if it has none."""
        try:
            samples = list(self._encode(record))
        except ConfigError as error:
            self.failed += 1
            if len(self.problems) < LISTED:
                self.problems += error.problems
            return True
        for sample in samples:
            store.add(sample)
        return bool(samples)

    def check(self) -> None:
        more = [f"{self.failed - LISTED:,} more records cannot be tokenized."] if self.failed > LISTED else []
        if problems := [*self.bad.problems(), *self.problems, *more]:
            raise ConfigError(problems)


def read_fine_tuning_data(spec: DataSpec, args: TrainingArguments, encode: Encode) -> FineTuningData:
    """The samples of ``spec``: every line of every file is checked before any problem is raised.

    Args:
        spec: the section ``data`` of a recipe.
        args: of the run: the seed, and whether rows are made from the lengths of samples.
        encode: gives the samples of a record.

    Raises:
        ConfigError: lists all bad lines, or the first of them with their number.
    """
    train_sources, eval_sources = open_sources(spec)
    split = _split(spec, train_sources)
    reading = _Reading(spec, encode)
    held_out = SampleStore()
    figures, stores = [], []
    for source in train_sources:
        store, row = SampleStore(), _figures(source)
        for record in source.read(reading.bad):
            row.records += 1
            if split is not None and split.takes(record):
                row.held_out += 1
                reading.add(record, held_out)
            elif not reading.add(record, store):
                row.without_sample += 1
        figures.append(_completed(row, source, store))
        stores.append(store)
    eval_figures = []
    for source in eval_sources:
        store, row = SampleStore(), _figures(source)
        for record in source.read(reading.bad):
            row.records += 1
            row.without_sample += not reading.add(record, store)
        for index in range(len(store)):
            held_out.add(store[index])
        eval_figures.append(_completed(row, source, store))
    reading.check()
    _check_not_empty(spec, figures, held_out)
    names = _distinct([row.name for row in figures])
    for row, name in zip(figures, names, strict=True):
        row.name = name
    train = _mixture(spec, args, stores, names)
    lines = [source.describe() for source in (*train_sources, *eval_sources)]
    lines += _lines(train, reading.bad, figures)
    return FineTuningData(train, held_out if spec.has_eval else None, figures, eval_figures, reading.bad.count, lines)


def _split(spec: DataSpec, sources: Sequence[Source]) -> HeldOut | None:
    if spec.held_out is None:
        return None
    if spec.held_out < 1:
        return HeldOut.share(spec.held_out)
    bad = BadLines(spec.bad_lines)
    try:
        return HeldOut.count(int(spec.held_out), _all(sources, bad))
    finally:
        bad.check()


def _all(sources: Sequence[Source], bad: BadLines) -> Iterator[Record]:
    for source in sources:
        yield from source.read(bad)


def _figures(source: Source) -> SourceFigures:
    format = source.find_format()
    kind, name = ("unknown", "unknown") if format is None else (format.kind, format.name)
    return SourceFigures(source.name, kind, name, len(source.files))


def _completed(row: SourceFigures, source: Source, store: SampleStore) -> SourceFigures:
    row.samples, row.tokens, row.trained_tokens = len(store), store.tokens, store.trained_tokens
    return row


def _check_not_empty(spec: DataSpec, figures: Sequence[SourceFigures], held_out: SampleStore) -> None:
    problems = [
        f"data.train: the source {row.name} has no sample to train on: {row.records:,} records, {row.held_out:,} of "
        f"them held out, {row.without_sample:,} too long."
        for row in figures
        if row.samples == 0
    ]
    if spec.has_eval and len(held_out) == 0:
        problems.append(
            "data: there is no sample for evaluation. Set data.held_out to a larger share or a number, or name other "
            "files in data.eval."
        )
    if problems:
        raise ConfigError(problems)


def _distinct(names: Sequence[str]) -> list[str]:
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(names)]


def _mixture(spec: DataSpec, args: TrainingArguments, stores: Sequence[SampleStore], names: Sequence[str]) -> Mixture:
    weights = [entry.weight for _, entry in spec.sources("train")]
    given = [weight for weight in weights if weight is not None]
    seed = args.seed if args.data_seed is None else args.data_seed
    by_length = args.packing or str(args.train_sampling_strategy) in _BY_LENGTH
    return Mixture(stores, given or None, names=names, seed=seed, new_samples=not by_length)


def _lines(train: Mixture, bad: BadLines, figures: Sequence[SourceFigures]) -> list[str]:
    lines = train.describe() if train.weighted else []
    held_out = sum(row.held_out for row in figures)
    lines += [f"{held_out:,} records are held out for evaluation."] if held_out else []
    lines += [f"{bad.count:,} bad lines were left out (data.bad_lines: skip)."] if bad.count else []
    return lines

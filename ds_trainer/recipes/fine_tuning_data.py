"""The samples of a fine-tuning recipe: sources read, checked, split, tokenized, and mixed."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from torch.utils.data import ConcatDataset

from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.data.source_ids import with_source
from ds_trainer.recipes.data_spec import DataSpec
from ds_trainer.recipes.encoding import BAD_LINE, RecordEncoder, identity_of
from ds_trainer.recipes.prepared_sources import open_sources, prepare_sources
from ds_trainer.samples.chat.problems import NOTICES, unread_lines, unread_of
from ds_trainer.samples.prepared.dataset import PreparedDataset
from ds_trainer.samples.prepared.prepare import NothingPrepared, default_directory
from ds_trainer.samples.sources.formats import RecordFormat
from ds_trainer.samples.sources.held_out import HeldOut
from ds_trainer.samples.sources.mixture import Mixture
from ds_trainer.samples.sources.mixture_stream import MixtureStream
from ds_trainer.samples.sources.record import BadLines
from ds_trainer.samples.sources.source import Source
from ds_trainer.training.loop.source_losses import records_sources
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

_COUNTED = ("records", "dropped", "samples", "untrained", BAD_LINE)
STREAMED = 2000
"""Records of a source that are read, before training or to be shown, if it is streamed."""
_BY_LENGTH = ("group_by_length", "batch_rebalance")


@dataclass
class SourceFigures:
    """What became of a source.

    Attributes:
        name, kind, format: what the source is called, and what its samples are.
        files: that were read.
        records: that are trained on (of evaluation data: evaluated), without bad lines.
        samples, tokens, trained_tokens: that they gave; the first token of a sample is no target.
        without_sample: records that gave none, because they are too long or cannot be encoded.
        bad_lines: that were left out.
        notices: what deserves to be known, counted (:data:`~ds_trainer.samples.chat.problems.NOTICES`).
        unread: keys of samples that no rule has read, with the number of samples.
    """

    name: str
    kind: str
    format: str
    files: int
    records: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    without_sample: int = 0
    bad_lines: int = 0
    notices: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)


class EvaluationSamples(ConcatDataset[Any]):
    """The samples of evaluation, one dataset after the other.

    Args:
        datasets: one for each source.
        names: how the sources are called.
        numbered: whether samples carry the number of their source (:mod:`ds_trainer.data.source_ids`).
    """

    def __init__(self, datasets: Sequence[PreparedDataset], names: Sequence[str], numbered: bool) -> None:
        super().__init__(datasets)
        self.names = tuple(names)
        self.source_names = self.names if numbered else None

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if self.source_names is None:
            return sample
        return with_source(sample, bisect_right(self.cumulative_sizes, range(len(self))[index]))

    @property
    def trained_tokens(self) -> int:
        """Tokens that are targets."""
        return sum(dataset.manifest.trained_tokens for dataset in self.datasets)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class FineTuningData:
    """The samples of a recipe.

    Attributes:
        train: what is trained on, mixed.
        eval: what is evaluated; None if there is nothing.
        sources, eval_sources: figures of each source.
        lines: what was found, for the log.
    """

    train: Mixture | MixtureStream
    eval: EvaluationSamples | None
    sources: list[SourceFigures]
    eval_sources: list[SourceFigures]
    lines: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        tokens = sum(figures.tokens for figures in self.sources)
        trained = sum(figures.trained_tokens for figures in self.sources)
        return {
            "sources": self._sources(),
            "eval_sources": [asdict(figures) for figures in self.eval_sources],
            "eval_samples": 0 if self.eval is None else len(self.eval),
            "eval_target_tokens": 0 if self.eval is None else self.eval.trained_tokens,
            "tokens": tokens,
            "trained_tokens": trained,
            "trained_share": trained / max(tokens, 1),
            "bad_lines": sum(figures.bad_lines for figures in (*self.sources, *self.eval_sources)),
        }

    def _sources(self) -> list[dict[str, Any]]:
        train = self.train
        if isinstance(train, MixtureStream):
            rows = zip(self.sources, train.shares, strict=True)
            return [{"name": row.name, "kind": row.kind, "format": row.format, "files": row.files, "share": share}
                    for row, share in rows]  # fmt: skip
        return [
            {**asdict(figures), "samples_per_epoch": samples, "repeats_per_epoch": repeats}
            for figures, samples, repeats in zip(self.sources, train.samples, train.repeats(), strict=True)
        ]


def open_text_sources(spec: DataSpec) -> tuple[list[Source], list[Source]]:
    """The sources of training and of evaluation, with samples that can be trained on here.

    Raises:
        ConfigError: paths match nothing, or samples are preferences; lists all problems.
    """
    return open_sources(spec, _preferences)


def _preferences(format: RecordFormat) -> str | None:
    if format.kind != "preference":
        return None
    return (
        f"{format.name} are for preference training, not for this job: take task dpo. To train on the good answers "
        "alone, set kind to messages (or text_key) if the samples have those too."
    )


def read_fine_tuning_data(spec: DataSpec, args: TrainingArguments, encoder: RecordEncoder) -> FineTuningData:
    """The samples of ``spec``, tokenized by one process of each machine, or found as an earlier run left them.

    Args:
        spec: the section ``data`` of a recipe.
        args: the arguments of the run: the seed, and whether rows are made from the lengths of samples.
        encoder: gives the samples of a record.

    Raises:
        ConfigError: lists all bad lines, or the first of them with their number.
    """
    train_sources, eval_sources = open_text_sources(spec)
    split = split_of(spec, train_sources)
    directory, identity = spec.prepared_dir or default_directory(), identity_of(encoder)
    problems: list[str] = []

    def samples_of(source: Source, split: HeldOut | None, held_out: bool) -> PreparedDataset | None:
        try:
            return prepare_sources([source], split, held_out, encoder, identity, directory)
        except NothingPrepared as error:
            if not held_out:  # a small source may have nothing on that side
                problems.extend(f"{source.key}: {problem}" for problem in error.problems)
        except ConfigError as error:
            files = [str(file.path) for file in source.files]
            located = [any(file in problem for file in files) for problem in error.problems]
            problems.extend(
                p if known else f"{source.key}: {p}" for p, known in zip(error.problems, located, strict=True)
            )
        return None

    trained = [] if spec.streaming else [samples_of(source, split, False) for source in train_sources]
    evaluated = [samples_of(source, None, False) for source in eval_sources]
    if split is not None and not problems:
        evaluated = [samples_of(source, split, True) for source in train_sources]
        if not problems and not any(evaluated):
            problems.append(
                f"data.held_out takes none of the records ({split.portion:.3g} of them are wanted). "
                "Equal records are on the same side; give a larger share, or a number of samples."
            )
    prepared = [dataset for dataset in trained if dataset is not None]
    held_out = [dataset for dataset in evaluated if dataset is not None]
    if problems:
        bad = BadLines(spec.bad_lines)  # tokenizing stops after some, so the files are read again for all of them
        for source in (*train_sources, *eval_sources):
            for _ in source.read(bad):
                pass
        raise ConfigError([*bad.problems(), *(problem for problem in problems if problem not in bad)])
    if spec.streaming:
        figures = [SourceFigures(s.name, _kind(s), s.format_name, len(s.files)) for s in train_sources]
    else:
        figures = [_figures(source, dataset) for source, dataset in zip(train_sources, prepared, strict=True)]
    eval_figures = [_figures(source, dataset) for source, dataset in zip(eval_sources, held_out, strict=False)]
    for rows in (figures, eval_figures):
        times = Counter(row.name for row in rows)
        for index, row in enumerate(rows):
            row.name += "" if times[row.name] == 1 else f" ({index})"
    train_names = [row.name for row in figures]
    train: Mixture | MixtureStream
    if spec.streaming:
        train = _stream(spec, args, train_sources, encoder, train_names)
    else:
        train = _mixture(spec, args, prepared, train_names)
    pairs = zip(figures if split is not None else eval_figures, evaluated, strict=True)
    names = [row.name for row, dataset in pairs if dataset is not None]
    evaluation = EvaluationSamples(held_out, names, records_sources(args) and len(names) > 1) if held_out else None
    data = FineTuningData(train, evaluation, figures, eval_figures)
    data.lines.extend(_lines(data, [*train_sources, *eval_sources], split is not None))
    return data


def split_of(spec: DataSpec, sources: Sequence[Source]) -> HeldOut | None:
    """Which records of the sources of training are held out; None without ``held_out``. A number of them is found by
    reading all records.

    Raises:
        ConfigError: there are bad lines, or too few records.
    """
    if spec.held_out is None:
        return None
    if spec.held_out < 1:
        return HeldOut.share(spec.held_out)
    bad = BadLines(spec.bad_lines)
    try:
        return HeldOut.count(int(spec.held_out), (record for source in sources for record in source.read(bad)))
    finally:
        bad.check()


def _figures(source: Source, dataset: PreparedDataset) -> SourceFigures:
    manifest = dataset.manifest
    counts = Counter(manifest.counts)
    return SourceFigures(
        name=source.name,
        kind=_kind(source),
        format=source.format_name,
        files=len(source.files),
        records=counts["records"] - counts[BAD_LINE],
        samples=manifest.samples,
        tokens=manifest.tokens,
        trained_tokens=manifest.trained_tokens,
        without_sample=counts["dropped"] - counts[BAD_LINE],
        bad_lines=counts[BAD_LINE],
        notices={name: count for name, count in counts.items() if name not in _COUNTED and ":" not in name},
        unread=unread_of(counts),
    )


def _kind(source: Source) -> str:
    format = source.find_format()
    return "unknown" if format is None else format.kind


def _mixture(
    spec: DataSpec, args: TrainingArguments, datasets: Sequence[PreparedDataset], names: Sequence[str]
) -> Mixture:
    weights = [entry.weight for _, entry in spec.sources("train")]
    set_weights = [weight for weight in weights if weight is not None]
    seed = args.seed if args.data_seed is None else args.data_seed
    by_length = args.packing or str(args.train_sampling_strategy) in _BY_LENGTH
    numbered = records_sources(args) and len(names) > 1
    return Mixture(datasets, set_weights or None, names=names, seed=seed, new_samples=not by_length, numbered=numbered)


def _stream(
    spec: DataSpec, args: TrainingArguments, sources: Sequence[Source], encoder: RecordEncoder, names: Sequence[str]
) -> MixtureStream:
    return MixtureStream(
        sources,
        encoder,
        [entry.weight or 1.0 for _, entry in spec.sources("train")],
        names=names,
        seed=args.seed if args.data_seed is None else args.data_seed,
        window=spec.shuffle_window,
        bad_lines=spec.bad_lines,
        numbered=records_sources(args) and len(names) > 1,
    )


def _lines(data: FineTuningData, sources: Sequence[Source], is_split: bool) -> list[str]:
    lines = []
    rows = [*data.sources, *data.eval_sources]
    if isinstance(data.train, MixtureStream):
        streamed = len(data.sources)
        for source in sources[:streamed]:
            lines += [f"{source.describe()}, streamed", *(f"  {line}" for line in _first_unread(source))]
        lines += data.train.describe()
        sources, rows = sources[streamed:], rows[streamed:]
    for source, row in zip(sources, rows, strict=True):
        source.count = row.records
        lines.append(f"{source.describe()}; {counted(row.tokens, 'token')}, {row.trained_tokens:,} of them trained on")
        lines += [f"  {counted(n, 'sample')}: {NOTICES.get(name, name)}" for name, n in row.notices.items() if n]
        lines += [f"  {line}" for line in unread_lines(row.unread)]
        lines += [f"  {row.bad_lines:,} bad lines were left out (data.bad_lines: skip)"] if row.bad_lines else []
    if isinstance(data.train, Mixture) and data.train.weighted:
        lines += data.train.describe()
    if is_split and data.eval is not None:
        lines.append(f"{counted(len(data.eval), 'sample is', 'samples are')} held out for evaluation.")
    return lines


def _first_unread(source: Source) -> list[str]:
    """What is to be said of the keys of the first records of a stream, which nobody counts."""
    records = list(islice(source.read(BadLines("skip")), STREAMED))
    lines = unread_lines(Counter(name for record in records for name in record.unread))
    return [f"{line}, of the first {counted(len(records), 'record')}" for line in lines]

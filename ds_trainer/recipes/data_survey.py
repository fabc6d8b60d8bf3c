"""What the data for a new recipe is: format, number and lengths of its first samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from ds_trainer.recipes.embedding_formats import KIND, embedding_format, read_row
from ds_trainer.recipes.starting_model import StartingModel
from ds_trainer.samples.chat.options import EncodeOptions
from ds_trainer.samples.chat.problems import SampleProblem
from ds_trainer.samples.images.image_encoder import ImageEncoder
from ds_trainer.samples.sources.formats import RecordFormat, recognize
from ds_trainer.samples.sources.record import BadLine, BadLines, BadRecord, Record
from ds_trainer.samples.sources.rows import SourceRow, read_rows
from ds_trainer.samples.sources.source import Source
from ds_trainer.samples.sources.spec import SourceSpec
from ds_trainer.utils.errors import ConfigError

MEASURED, COUNTED = 500, 100_000
IMAGES = "images"
"""Kind of conversations with images."""

_LABELS = ("label", "labels", "class", "category")


@dataclass(frozen=True)
class DataSurvey:
    """The data.

    Attributes:
        kind: what the records are (see :class:`ds_trainer.samples.sources.record.Record`), ``classification``,
            ``embedding`` or :data:`IMAGES`.
        format: what a reader calls it.
        samples: their number, at most :data:`COUNTED`.
        lengths: tokens of the first :data:`MEASURED` samples, sorted.
        label_key: the key of the label, for classification.
        bad_lines: among the samples that were counted.
    """

    kind: str
    format: str
    samples: int
    lengths: tuple[int, ...]
    label_key: str | None = None
    bad_lines: int = 0

    def percentile(self, share: float) -> int:
        """The length that this share of the measured samples does not exceed."""
        return self.lengths[max(0, math.ceil(share * len(self.lengths)) - 1)]

    def describe(self) -> str:
        """One sentence."""
        number = f"{self.samples:,}" if self.samples < COUNTED else f"more than {COUNTED:,}"
        noun = "sample" if self.samples == 1 else "samples"
        return (
            f"{number} {noun} of {self.format}; tokens: median {self.percentile(0.5):,}, 95 % up to "
            f"{self.percentile(0.95):,}, longest {self.lengths[-1]:,}"
            f"{'' if self.samples <= len(self.lengths) else f' (of the first {len(self.lengths):,})'}."
        )


def survey(paths: Sequence[str], model: StartingModel) -> DataSurvey:
    """Read the first samples of ``paths``.

    Args:
        paths: files, directories or glob patterns.
        model: whose tokens are counted, those of images by its processor; of a model of bytes, bytes.

    Raises:
        ConfigError: files are missing, or samples have no known or different formats; lists all problems. Or there are
            images, which the model does not take.
    """
    problems: list[str] = []
    sources: list[Source] = []
    for path in paths:
        try:
            sources.append(Source(SourceSpec(path=(path,)), "--data"))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    embeddings = _embeddings(sources, model.tokenizer)
    if embeddings is not None:
        return embeddings
    formats = [source.find_format() for source in sources]
    bad = BadLines("skip")
    kinds: dict[str, str] = {}
    for source, format in zip(sources, formats, strict=True):
        if format is None:
            list(islice(source.read(bad := BadLines("error")), MEASURED))
            problems += bad.problems()[:1] or [f"{source.name}: no sample."]
        else:
            kinds.setdefault(format.kind, source.name)
    if len(kinds) > 1:
        problems.append(
            f"--data: {', '.join(f'{name} has {kind}' for kind, name in kinds.items())}; give one kind only."
        )
    if problems:
        raise ConfigError(problems)
    label_key = _label_key(sources) if "text" in kinds else None
    lengths: list[int] = []
    samples = 0
    images: ImageEncoder | None = None
    unusable: list[str] = []
    for record in islice(_records(sources, bad), COUNTED):
        samples += 1
        if len(lengths) >= MEASURED:
            continue
        if not _has_images(record):
            lengths.append(tokens_of(record, model.tokenizer))
            continue
        images = images or ImageEncoder(model.processor(), EncodeOptions())
        try:
            lengths += [len(sample["input_ids"]) for sample in images.encode(record).samples]
        except SampleProblem as problem:
            unusable.append(str(problem))
    if not lengths:
        raise ConfigError(unusable[:1] or [f"--data {' '.join(paths)}: there is no sample."])
    kind = "classification" if label_key is not None else next(iter(kinds))
    with_images = images is not None and kind in ("messages", "prompt_completion")
    names = dict.fromkeys(format.name for format in formats if format is not None)
    described = "texts with labels" if label_key is not None else ", ".join(names)
    if with_images:
        kind, described = IMAGES, f"{described} with images"
    return DataSurvey(kind, described, samples, tuple(sorted(lengths)), label_key, bad.count + len(unusable))


def _embeddings(sources: Sequence[Source], tokenizer: Any) -> DataSurvey | None:
    """The survey of samples for embeddings; None if the first row is none, or could also be for a language model."""
    rows = (row for source in sources for file in source.files for row in read_rows(file))
    first = next(rows, None)
    known = embedding_format(first.value) if isinstance(first, SourceRow) else None
    if not isinstance(first, SourceRow) or known is None or isinstance(recognize(first.value), RecordFormat):
        return None
    lengths: list[int] = []
    samples = bad = 0
    for row in islice(chain([first], rows), COUNTED):
        try:
            fields = read_row(row).fields if isinstance(row, SourceRow) else None
        except BadRecord:
            fields = None
        samples, bad = samples + (fields is not None), bad + (fields is None)
        if fields is not None and len(lengths) < MEASURED:
            lengths.append(max(_count(text, tokenizer) for text in fields.values() if isinstance(text, str)))
    if not lengths:
        return None
    return DataSurvey(KIND, f"{known[0]} for embeddings", samples, tuple(sorted(lengths)), bad_lines=bad)


def _records(sources: Sequence[Source], bad: BadLines) -> Iterator[Record]:
    for source in sources:
        yield from source.read(bad)


def _has_images(record: Record) -> bool:
    turns = [turn for value in record.fields.values() if isinstance(value, list) for turn in value]
    contents = [turn["content"] for turn in turns if isinstance(turn, dict) and isinstance(turn.get("content"), list)]
    return bool(record.fields.get("images")) or any(part["type"] == "image" for parts in contents for part in parts)


def _label_key(sources: Sequence[Source]) -> str | None:
    """The key of a label beside the text in the first row of the first source, if there is one."""
    for row in read_rows(sources[0].files[0]):
        if isinstance(row, BadLine) or not isinstance(row, SourceRow) or not isinstance(row.value, dict):
            return None
        return next((key for key in _LABELS if isinstance(row.value.get(key), str | int)), None)
    return None


def tokens_of(record: Record, tokenizer: Any) -> int:
    """About how many tokens a record has; with a chat template, with its tokens."""
    fields = record.fields
    if "messages" in fields and getattr(tokenizer, "chat_template", None):
        try:
            encoded = tokenizer.apply_chat_template(fields["messages"], tools=fields.get("tools"), tokenize=False)
        except Exception:  # a template may refuse anything, in any way; the job says why, and this is an estimate
            encoded = " ".join(_texts(fields))
        return _count(encoded, tokenizer)
    both = _count(" ".join(_texts({"prompt": fields.get("prompt")})), tokenizer)
    if "chosen" in fields:  # the longer of the two
        return both + max(_count(" ".join(_texts(fields[key])), tokenizer) for key in ("chosen", "rejected"))
    return _count("\n".join(_texts(fields)), tokenizer)


def _count(text: str, tokenizer: Any) -> int:
    if tokenizer is None:
        return len(text.encode())
    # verbose: init says itself that samples are longer than the model's positions.
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _texts(value: Any) -> Iterator[str]:
    """All texts in a tree of lists and mappings, but the names of roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            if key not in ("role", "type"):
                yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)

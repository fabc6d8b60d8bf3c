"""The page of ``ds-trainer data show``: samples as they are trained on, and figures of all of them."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TextIO

import numpy as np

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.order import epoch_order
from ds_trainer.data.packing.rows import PackedRows, packed_rows
from ds_trainer.samples.chat.encoder import Encoder, Sample
from ds_trainer.samples.chat.problems import NOTICES, SampleProblem, unread_lines, unread_of
from ds_trainer.samples.chat.tokens import IGNORED
from ds_trainer.samples.sources.mixture import Mixture
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.units import counted


@dataclass(frozen=True)
class PageOptions:
    """What is shown.

    Attributes:
        samples: number of samples of each source.
        tokens: token by token, one line each.
        color: for a terminal.
        packing: rows of ``row_length`` tokens in the order of the first epoch with ``seed``; None: no packing.
        trained: how many of the sources are trained on, the first ones; None: all.
        weights: how often each source is drawn from; None: every sample of every source is read once.
        epochs: in which samples of weighted sources are counted.
    """

    samples: int = 3
    tokens: bool = False
    color: bool = False
    packing: PackingStrategy | None = None
    row_length: int = 0
    seed: int = 42
    trained: int | None = None
    weights: tuple[float, ...] | None = None
    epochs: float = 1.0


class _PageSample(NamedTuple):
    """A sample that is shown: its position in its source, and where its record was read."""

    position: int
    where: str
    sample: Sample


def write_page(
    sources: Iterable[tuple[str, Iterable[Record]]],
    encoder: Encoder,
    options: PageOptions,
    write: Callable[[str], None],
) -> dict[str, Figures]:
    """Encode all records, write samples and figures, and return the figures of each source.

    Args:
        sources: name and records of each.
        encoder: gives the samples of a record.
        options: what is shown.
        write: gets each line.
    """
    figures: dict[str, Figures] = {}
    shown: dict[str, list[_PageSample]] = {}
    for name, records in sources:
        side = figures[name] = Figures()
        chosen = shown[name] = []
        for record in records:
            for sample in side.add(encoder, record):
                if len(chosen) < options.samples:
                    chosen.append(_PageSample(len(chosen), record.source, sample))
    epoch = _epoch(figures, options)
    rows = None if epoch is None else _rows(epoch, options)
    places = {} if rows is None or epoch is None else _places(rows, epoch, options.samples)
    for number, (name, chosen) in enumerate(shown.items()):
        for one in chosen:
            for line in _sample_lines(name, one, encoder, options, places.get((number, one.position))):
                write(line)
    for name, side in figures.items():
        write(f"=== {name} ===")
        for line in side.lines():
            write(line)
        write("")
    for line in epoch.describe(options.epochs) if epoch is not None and epoch.weighted else ():
        write(line)
    if rows is not None:
        write(f"packed: {rows.summary.text()}")
    return figures


def _sample_lines(
    name: str, one: _PageSample, encoder: Encoder, options: PageOptions, place: str | None
) -> Iterator[str]:
    for key in one.sample:
        if not key.endswith("input_ids"):
            continue
        side = key.removesuffix("input_ids")
        ids, labels = one.sample[key], one.sample[f"{side}labels"]
        trained = int(np.count_nonzero(labels[1:] != IGNORED))
        described = [
            f"{name}, {one.where}" + (f", {side.removesuffix('_')}" if side else ""),
            f"{counted(len(ids), 'token')}, {trained:,} trained on ({trained / len(ids):.0%})",
        ]
        described += [] if place is None else [place]
        yield f"--- {'; '.join(described)} ---"
        if options.tokens:
            yield from token_lines(encoder.tokenizer, ids, labels, options.color)
        else:
            yield sample_text(encoder.tokenizer, ids, labels, options.color)
        yield ""


def _epoch(figures: dict[str, Figures], options: PageOptions) -> Mixture | None:
    """The lengths of the samples of an epoch; None if a source that is trained on has none."""
    trained = dict(list(figures.items())[: options.trained])
    lengths = [side.lengths for side in trained.values()]
    if not lengths or not all(lengths):
        return None
    return Mixture(
        lengths, options.weights, names=list(trained), seed=options.seed, new_samples=options.packing is None
    )


def _rows(epoch: Mixture, options: PageOptions) -> PackedRows | None:
    """The rows as training packs them."""
    if options.packing is None:
        return None
    lengths = [epoch[index] for index in range(len(epoch))]
    order = epoch_order(len(lengths), options.seed, 0, shuffle=True)
    return packed_rows(lengths, options.row_length, options.packing, order, options.seed)


def _places(rows: PackedRows, epoch: Mixture, samples: int) -> dict[tuple[int, int], str]:
    """Where the first ``samples`` of each source are packed first: the row, the tokens in it, what else is in it."""
    places: dict[tuple[int, int], str] = {}
    for row in range(len(rows)):
        position = 0
        pieces = list(rows.row(row))
        for index, start, length in pieces:
            source, number = epoch.locate(index)
            if number < samples and start == 0 and (source, number) not in places:
                others = [_name(epoch, other) for other, _, _ in pieces if other != index]
                beside = f" with {', '.join(others[:4])}{', ...' if len(others) > 4 else ''}" if others else ""
                places[source, number] = f"row {row}, tokens {position} to {position + length - 1}{beside}"
            position += length
    return places


def _name(epoch: Mixture, index: int) -> str:
    source, number = epoch.locate(index)
    return f"sample {number} of {epoch.names[source]}"


_EXAMPLES = 3  # sources named for each notice and reason
_DIGEST = 8  # bytes; of ten million samples, two different ones are taken for equal once in 400,000 runs


@dataclass
class Figures:
    """What is known about the samples of one source, or of all.

    Attributes:
        records: records read.
        samples: samples that came of them.
        lengths: tokens of each sample, or of each of the two answers of a preference.
        trained: how many of them are trained on.
        duplicates: samples that are equal to an earlier one.
        notices: number of records for each key of NOTICES, and for each key that no rule has read.
        refused: number of records that cannot be encoded, by reason.
        examples: for each key of both: the sources of the first few.
        messages: for each reason: the first message.
    """

    records: int = 0
    samples: int = 0
    lengths: array[int] = field(default_factory=lambda: array("q"))
    trained: array[int] = field(default_factory=lambda: array("q"))
    duplicates: int = 0
    notices: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set, repr=False)

    def add(self, encoder: Encoder, record: Record) -> list[Sample]:
        """Encode a record, count what came of it, and return the samples."""
        self.records += 1
        try:
            samples, notices = encoder.encode(record)
        except SampleProblem as problem:
            self.refused[problem.reason] += 1
            self.messages.setdefault(problem.reason, problem.message)
            self._example(problem.reason, record.source)
            return []
        for notice in notices:
            self.notices[notice] += 1
            self._example(notice, record.source)
        for sample in samples:
            self.samples += 1
            digest = hashlib.blake2b(digest_size=_DIGEST)
            for ids, labels in _sides(sample):
                digest.update(b"%d " % len(ids) + ids.tobytes())
                self.lengths.append(len(ids))
                self.trained.append(int(np.count_nonzero(labels[1:] != IGNORED)))  # nothing predicts the first one
            number = int.from_bytes(digest.digest(), "little")
            self.duplicates += number in self._seen
            self._seen.add(number)
        return samples

    def _example(self, key: str, source: str) -> None:
        named = self.examples.setdefault(key, [])
        if len(named) < _EXAMPLES:
            named.append(source)

    def lines(self) -> list[str]:
        """A page for a terminal."""
        pairs = " of two answers" if len(self.lengths) > self.samples else ""
        lines = [f"{counted(self.records, 'record')}, {counted(self.samples, 'sample')}{pairs}"]
        if self.lengths:
            lengths, trained = np.asarray(self.lengths), np.asarray(self.trained)
            share = trained.sum() / lengths.sum()
            shares = trained / lengths
            lines += [
                f"tokens        {lengths.sum():,}; trained on {trained.sum():,} ({share:.1%}; of a sample "
                f"{shares.min():.1%} to {shares.max():.1%})",
                f"length        min {lengths.min():,}, median {np.median(lengths):,.0f}, 95 % below "
                f"{np.percentile(lengths, 95):,.0f}, max {lengths.max():,}",
                f"duplicates    {self.duplicates:,}",
                *histogram(lengths),
            ]
        for key, count in self.refused.items():
            lines.append(f"refused       {count:,}: {self._named(key)}: {self.messages[key]}")
        for key, count in self.notices.most_common():
            if key in NOTICES:
                lines.append(f"{counted(count, 'sample')}: {NOTICES[key]} ({self._named(key)})")
        return lines + unread_lines(unread_of(self.notices))

    def _named(self, key: str) -> str:
        total = self.refused[key] + self.notices[key]
        return ", ".join(self.examples[key]) + (", ..." if total > len(self.examples[key]) else "")


def _sides(sample: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(token ids, labels) of a sample; of both answers of a preference."""
    for key in sample:
        if key.endswith("input_ids"):
            yield sample[key], sample[key.removesuffix("input_ids") + "labels"]


def histogram(lengths: np.ndarray, width: int = 40) -> list[str]:
    """Samples by length, in powers of two: one line each."""
    exponents = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(exponents)
    first = int(np.flatnonzero(counts)[0])
    largest = counts.max()
    return [
        f"{2**exponent:>7,} to {2 ** (exponent + 1) - 1:>9,} {'#' * -(-width * count // largest):<{width}} {count:,}"
        for exponent, count in enumerate(counts.tolist())
        if exponent >= first
    ]


# Samples as text for a terminal: what is trained on stands out.


_TRAINED, _MASKED, _RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"
# Data could move the cursor or clear the screen: control characters are shown as their symbols.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_CONTROLS |= {code: 0xFFFD for code in range(0x80, 0xA0)}
BEGIN, END = "⟦", "⟧"


def uses_color(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to color what is written to ``stream``: a terminal, and NO_COLOR (no-color.org) is not set."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def sample_text(tokenizer: Any, ids: np.ndarray, labels: np.ndarray, color: bool) -> str:
    """The text of a sample: trained parts in green and the rest dim, or trained parts in ⟦ ⟧.

    Args:
        tokenizer: decodes.
        ids: token ids, shape [tokens].
        labels: a number for each of them, -100 where nothing is trained on.
        color: whether to use the colors of a terminal.
    """
    text = ""
    for trained, part in parts(ids, labels):
        decoded = tokenizer.decode(part.tolist()).translate(_CONTROLS)
        if color:
            text += f"{_TRAINED if trained else _MASKED}{decoded}{_RESET}"
        else:
            text += f"{BEGIN}{decoded}{END}" if trained else decoded
    return text


def token_lines(tokenizer: Any, ids: np.ndarray, labels: np.ndarray, color: bool) -> list[str]:
    """One line per token: position, id, whether it is trained on, text."""
    lines = []
    for position, (token, label) in enumerate(zip(ids.tolist(), labels.tolist(), strict=True)):
        trained = label != IGNORED
        line = f"{position:>6} {token:>7} {'trained' if trained else '-':<8} {tokenizer.decode([token])!r}"
        lines.append(f"{_TRAINED if trained else _MASKED}{line}{_RESET}" if color else line)
    return lines


def parts(ids: np.ndarray, labels: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """Runs of tokens, and whether they are trained on.

    Args:
        ids: token ids, shape [tokens].
        labels: a number for each of them, -100 where nothing is trained on.
    """
    trained = labels != IGNORED
    edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(ids)]
    for start, end in pairwise(edges):
        if end > start:
            yield bool(trained[start]), ids[start:end]

"""Figures of encoded samples: lengths, what is trained on, what was left out and why."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ds_trainer.samples.chat.encoder import Encoder, Sample
from ds_trainer.samples.chat.problems import NOTICES, SampleProblem, unread_lines, unread_of
from ds_trainer.samples.chat.tokens import IGNORED
from ds_trainer.samples.sources.record import Record

_EXAMPLES = 3  # sources named for each notice and reason
_DIGEST = 8  # bytes; of ten million samples, two different ones are taken for equal once in 400,000 runs


@dataclass
class Figures:
    """What is known about the samples of one source, or of all.

    Attributes:
        records: records read.
        samples: samples that came of them.
        lengths: tokens of each sample, or of each of the two answers of a preference.
        trained: those of them that are trained on.
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
        lines = [f"{self.records:,} records, {self.samples:,} samples{pairs}"]
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
                lines.append(f"{count:,} samples: {NOTICES[key]} ({self._named(key)})")
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

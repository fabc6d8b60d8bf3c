"""Records of conversations, and an ``encode`` with a real tokenizer: what the other tests of this folder prepare.

Imports no torch: worker processes import this module.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ds_trainer.samples.prepared.workers import Part
from ds_trainer.samples.sources.record import Record

_TEXT = "the of a model learns from text that people write and answers what they ask in few plain words"
_WORDS = _TEXT.split(" ")


def write_conversations(directory: Path, files: int = 3, lines: int = 40, first: int = 0) -> list[Path]:
    """Some jsonl files with a prompt and a completion per line, the same at every call."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for file in range(files):
        random = np.random.default_rng(first + file)
        rows = []
        for line in range(lines):
            words = [_WORDS[i] for i in random.integers(0, len(_WORDS), int(random.integers(4, 40)))]
            cut = max(1, len(words) // 3)
            rows.append({"prompt": f"{file} {line} " + " ".join(words[:cut]), "completion": " ".join(words[cut:])})
        paths.append(directory / f"part-{file}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def read_lines(path: str) -> Iterator[Record]:
    """The records of a jsonl file."""
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            yield Record(f"{os.path.basename(path)}:{number}", "prompt_completion", json.loads(line))


def parts_of(paths: list[Path]) -> list[Part]:
    """One part for each file."""
    return [Part(path.stat().st_size, partial(read_lines, str(path))) for path in paths]


class Encode:
    """Tokens of prompt and completion, trained on the completion.

    Args:
        seconds: that each record takes in addition, so that a test can interrupt.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        letters = [chr(code) for code in range(32, 127)]
        vocabulary = {token: number for number, token in enumerate(dict.fromkeys(["?", *letters, *_WORDS]))}
        self.tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        self.seconds = seconds

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def __call__(self, record: Record) -> dict[str, Any] | None:
        time.sleep(self.seconds)
        prompt = self.tokenizer.encode(record.fields["prompt"]).ids
        completion = self.tokenizer.encode(record.fields["completion"]).ids
        return {
            "input_ids": np.asarray(prompt + completion, np.int32),
            "labels": np.asarray([-100] * len(prompt) + completion, np.int32),
        }


IDENTITY = {"tokenizer": "words", "trained on": "completion"}


def expected(paths: list[Path], encode: Encode) -> list[tuple[str, list[int], list[int]]]:
    """Source, ids and labels of every sample, made without the package."""
    found = []
    for path in paths:
        for record in read_lines(str(path)):
            sample = encode(record)
            assert sample is not None
            found.append((record.source, sample["input_ids"].tolist(), sample["labels"].tolist()))
    return found


def read_all(dataset: Any) -> list[tuple[str, list[int], list[int]]]:
    """Source, ids and labels of every sample of a prepared dataset."""
    samples = [dataset[index] for index in range(len(dataset))]
    return [(dataset.source(i), s["input_ids"].tolist(), s["labels"].tolist()) for i, s in enumerate(samples)]

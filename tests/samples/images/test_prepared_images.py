"""Prepared samples keep their images, in shards where some samples have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ds_trainer.samples.prepared.prepare import prepare
from ds_trainer.samples.prepared.workers import Part
from ds_trainer.samples.sources.record import Record


def images_of(number: int) -> list[str]:
    return [f"/pictures/{number}-{index} é.png" for index in range(number % 3)]


class Records:
    """Records of a range of numbers; can be pickled."""

    def __init__(self, first: int, last: int) -> None:
        self.range = range(first, last)

    def __call__(self) -> list[Record]:
        return [Record(f"a:{number}", "text", {"number": number}) for number in self.range]


def encode(record: Record) -> dict[str, Any]:
    number = record.fields["number"]
    ids = np.arange(number % 5 + 2)
    sample = {"input_ids": ids, "labels": np.where(ids > 0, ids, -100)}
    return {**sample, "images": images_of(number)} if number < 50 else sample


def test_images_come_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(100))
    parts = [Part(2**30, Records(0, 50)), Part(2**30, Records(50, 100))]  # each a shard of its own
    dataset = prepare(parts, encode, tmp_path / "out", files=[tmp_path / "a"], identity={}, vocab_size=10, processes=1)
    assert len(dataset) == 100 and len(dataset.manifest.shards) == 2
    for number in (0, 1, 2, 17, 49):
        assert dataset[number]["images"] == images_of(number)
        assert dataset[number]["input_ids"].tolist() == list(range(number % 5 + 2))
        assert dataset.source(number) == f"a:{number}"
    assert "images" not in dataset[50] and dataset.source(99) == "a:99"
    dataset.verify()

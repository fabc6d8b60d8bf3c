"""The split by content: deterministic, disjoint, of the right size."""

from __future__ import annotations

import random

import pytest

from ds_trainer.samples.sources.held_out import HeldOut, digest
from ds_trainer.samples.sources.record import Record
from ds_trainer.utils.errors import ConfigError

RECORDS = [Record(f"x:{number}", "text", {"text": f"sample {number}"}) for number in range(2000)]


def test_a_share_is_about_that_share_and_does_not_depend_on_places() -> None:
    split = HeldOut.share(0.1)
    taken = {record.fields["text"] for record in RECORDS if split.takes(record)}
    assert 150 < len(taken) < 250
    moved = [Record("elsewhere", *record[1:]) for record in random.Random(0).sample(RECORDS, len(RECORDS))]
    assert {record.fields["text"] for record in moved if split.takes(record)} == taken
    # A larger share has all of a smaller one.
    larger = HeldOut.share(0.2)
    assert all(larger.takes(record) for record in RECORDS if split.takes(record))


@pytest.mark.parametrize("count", [1, 2, 50, 1999])
def test_a_count_is_exact(count: int) -> None:
    split = HeldOut.count(count, RECORDS)
    taken = [record for record in RECORDS if split.takes(record)]
    assert len(taken) == count
    again = HeldOut.count(count, reversed(RECORDS))
    assert again.limit == split.limit
    assert sorted(map(digest, taken)) == sorted(map(digest, RECORDS))[:count]


def test_equal_samples_are_on_one_side() -> None:
    doubled = [*RECORDS, *RECORDS]
    split = HeldOut.count(50, doubled)
    taken = [record.fields["text"] for record in doubled if split.takes(record)]
    kept = [record.fields["text"] for record in doubled if not split.takes(record)]
    assert len(taken) == 100
    assert len(set(taken)) == 50
    assert not set(taken) & set(kept)


def test_too_few_samples() -> None:
    with pytest.raises(ConfigError, match=r"data.held_out=3 leaves nothing to train on: there are 6 records, 3 of"):
        HeldOut.count(3, [*RECORDS[:3], *RECORDS[:3]])


def test_the_digest_is_that_of_all_fields() -> None:
    one = Record("a", "messages", {"messages": [{"role": "user", "content": "x"}], "tools": []})
    other = Record("a", "messages", {"tools": [], "messages": [{"content": "x", "role": "user"}]})
    assert digest(one) == digest(other)
    assert digest(one) != digest(one._replace(kind="text"))
    images = [Record("a", "text", {"text": "x", "images": [{"bytes": content}]}) for content in (b"1", b"2")]
    assert digest(images[0]) != digest(images[1])

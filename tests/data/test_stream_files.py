"""With ``stream_shards`` ranks must have the same files: files that a script has divided by rank would be lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from ds_trainer import ConfigError
from ds_trainer.data.stream_shards import source_lists
from ds_trainer.utils import distributed
from tests.data.test_stream_shards import collate, flat, loader, samples_of
from tests.support.pool import pool


class Paths(IterableDataset[int]):
    """A user's stream: two samples of each file, that are its number."""

    def __init__(self, files: list[str]) -> None:
        self.files = files
        self.generator = None
        self.rank = distributed.rank()

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Paths:
        return Paths(self.files[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            yield from 2 * [int(file.rpartition("/")[2])]


class Inside(Paths):
    """A stream in another one."""

    def __init__(self, stream: Paths) -> None:
        self.stream, self.generator = stream, None

    files = property(lambda self: self.stream.files)  # type: ignore[assignment]

    def shard(self, num_shards: int, index: int) -> Paths:
        return Inside(self.stream.shard(num_shards, index))


def rows(files: list[Any]) -> Iterator[dict[str, int]]:
    for file in files:
        yield from 2 * [{"x": int(str(file).rpartition("/")[2])}]


def stream_of(kind: str, files: list[Any]) -> Any:
    from datasets import IterableDataset as Hub

    if kind in ("own class", "inside"):
        return Paths(files) if kind == "own class" else Inside(Paths(files))
    found = Hub.from_generator(rows, gen_kwargs={"files": files})
    return found if kind == "datasets" else found.map(dict).shuffle(0, buffer_size=2)


def read(kind: str, how: str) -> Any:
    """The samples of this rank, or the refusal, and warnings."""
    rank, ranks = distributed.rank(), distributed.world_size()
    files = {
        "the same": ["a/0", "a/1", "a/2", "a/3"],
        "by hand": [f"a/{number}" for number in range(rank, 8, ranks)],
        "numbers by hand": list(range(rank, 8, ranks)),
        "other folders": [f"{rank}/0", f"{rank}/1"],
        "another order": ["a/0", "a/1"][:: 1 - 2 * rank],
    }[how]
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_trainer").addHandler(handler)
    try:
        one = loader(stream_of(kind, files), ranks, rank)
        one.collate_fn = collate
        return samples_of(one), messages
    except ConfigError as error:
        return str(error), messages
    finally:
        logging.getLogger("ds_trainer").removeHandler(handler)


KINDS = ["own class", "inside", "datasets", "shuffled"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_a_script_has_divided_are_refused_on_all_ranks(kind: str) -> None:
    hands = ["by hand", "another order", *(["numbers by hand"] if kind in KINDS[2:] else [])]
    for how in hands:
        for text, _ in pool(2).run(read, kind, how):
            assert "is made of different files (rank 1 has others than rank 0)" in text, how
            assert "set stream_shards='own'" in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_files_are_read_and_other_folders_are_mentioned(kind: str) -> None:
    found = pool(2).run(read, kind, "the same")
    assert sorted(flat(found[0][0]) + flat(found[1][0])) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[0][1] == found[1][1] == []
    found = pool(2).run(read, kind, "other folders")  # as each machine has its copy, or its part
    (message,) = found[0][1]
    assert "same names in different folders" in message and found[1][1] == []


def test_only_lists_of_files_are_seen() -> None:
    assert list(source_lists(Inside(Paths(["a", "b"])))) == [["a", "b"]]
    one = Paths([])
    one.samples, one.names = [1, 2], ("x", 3)  # type: ignore[attr-defined]
    assert list(source_lists(one)) == []
    assert list(source_lists(iter([1]))) == []

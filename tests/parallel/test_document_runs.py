"""Runs of documents give exactly what the numbers of all tokens give, of which the definition is here."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
import torch

from ds_trainer.parallel.document_runs import DocumentRuns

CPU = torch.device("cpu")


class Dense:
    """The definition: the number of each token as a query, as a key, and as a key that is no padding."""

    def __init__(self, documents: torch.Tensor | None, valid: torch.Tensor | None) -> None:
        if documents is None:
            assert valid is not None
            documents = torch.zeros(valid.shape, dtype=torch.int64)
        self.queries = documents
        self.keys = documents if valid is None else documents.masked_fill(~valid, int(documents.min()) - 1)
        self.valid = documents if valid is None else documents.masked_fill(~valid, int(documents.max()) + 1)

    def share(self, chunk: int) -> torch.Tensor:
        lowest, highest = torch.aminmax(self.queries.unflatten(1, (-1, chunk)), dim=2)
        highest_key = self.keys.unflatten(1, (-1, chunk)).amax(2)
        lowest_valid = self.valid.unflatten(1, (-1, chunk)).amin(2)
        apart = (highest[:, :, None] < lowest_valid[:, None]) | (highest_key[:, None] < lowest[:, :, None])
        return ~apart.all(0)

    def compare(self, queries: list[tuple[int, int]], keys: list[tuple[int, int]]) -> bool | None:
        lowest, highest = self._range(self.queries, queries)
        lowest_key, highest_key = self._range(self.keys, keys)
        lowest_valid, _ = self._range(self.valid, keys)
        if bool(((highest < lowest_valid) | (highest_key < lowest)).all()):
            return None
        return bool(((lowest == highest) & (lowest == lowest_key) & (highest == highest_key)).all())

    @staticmethod
    def _range(numbers: torch.Tensor, ranges: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.aminmax(torch.cat([numbers[:, first:last] for first, last in ranges], 1), dim=1)

    def same(self, queries: tuple[int, int], keys: tuple[int, int]) -> torch.Tensor:
        return self.queries[:, slice(*queries), None] == self.keys[:, None, slice(*keys)]


KINDS = ("in order", "in any order", "repeated", "none")
PADDING = ("none", "right", "left", "scattered", "all of a row", "no token")


def drawn(kind: str, padding: str, seed: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    draws = torch.Generator().manual_seed(seed)
    rows, length = int(torch.randint(1, 4, (), generator=draws)), 4 * int(torch.randint(1, 9, (), generator=draws))
    documents = (torch.rand(rows, length, generator=draws) < 0.3).long().cumsum(1)
    if kind == "in any order":
        documents = (documents * 7 - int(torch.randint(0, 20, (), generator=draws))) % 11 - 3
    if kind == "repeated":  # tokens with equal numbers see each other, also with other documents in between
        documents = documents % 2
    used = torch.randint(0, length + 1, (rows, 1), generator=draws)
    valid: torch.Tensor | None = torch.arange(length) < used
    if padding == "left":
        valid = valid.flip(1)
    if padding == "scattered":
        valid = torch.rand(rows, length, generator=draws) < 0.7
    if padding == "all of a row":
        valid = torch.ones(rows, length, dtype=torch.bool)
        valid[0] = False
    if padding == "no token":
        valid = torch.ones(rows, length, dtype=torch.bool)
    return (None if kind == "none" else documents), (None if padding == "none" else valid)


def differences(runs: DocumentRuns, dense: Dense) -> list[str]:
    """What is not as in the definition, for many ranges of tokens."""
    length, found = dense.queries.shape[1], []
    step = max(1, length // 5)
    ranges = [(a, b) for a, b in product(range(0, length, step), range(1, length + 1, step)) if a < b]
    for chunk in (1, 2, 4, length // 4, length):
        if not torch.equal(runs.share(chunk), dense.share(chunk)):
            found.append(f"share {chunk}")
    for queries, keys in product(ranges, ranges):
        if runs.compare([queries], [keys]) != dense.compare([queries], [keys]):
            found.append(f"compare {queries} {keys}")
        if not torch.equal(runs.same(queries, keys, CPU), dense.same(queries, keys)):
            found.append(f"same {queries} {keys}")
    for first, second in zip(ranges, reversed(ranges), strict=True):  # two ranges, as of a rank of a ring
        if runs.compare([first, second], [second, first]) != dense.compare([first, second], [second, first]):
            found.append(f"compare both {first} {second}")
    tokens = torch.arange(0, length, step)
    valid = dense.keys.eq(dense.queries)[:, tokens]
    return found if torch.equal(runs.valid_at(tokens), valid) else [*found, "valid"]


@pytest.mark.cases(3)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_what_the_tokens_say(kind: str, padding: str) -> None:
    for seed in range(4):
        documents, valid = drawn(kind, padding, seed)
        runs = DocumentRuns.of(documents, valid)
        if runs is None:
            assert documents is None and valid is None
            continue
        assert differences(pickle.loads(pickle.dumps(runs)), Dense(documents, valid)) == []


def test_control_a_wrong_border_is_noticed() -> None:
    documents, valid = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]]), torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    runs = DocumentRuns.of(documents, valid)
    assert runs is not None and differences(runs, Dense(documents, valid)) == []
    later = DocumentRuns(1, 8, runs.starts + torch.tensor([0, 0, 1, 0]), runs.numbers, runs.valid)
    assert {text.split()[0] for text in differences(later, Dense(documents, valid))} == {"compare", "same", "share"}
    filled = DocumentRuns(1, 8, runs.starts, runs.numbers)
    assert "valid" in differences(filled, Dense(documents, valid))


def test_runs_are_as_small_as_there_are_documents() -> None:
    documents = torch.arange(1000).repeat_interleave(1000)[None]
    runs = DocumentRuns.of(documents, documents < 999)
    assert runs is not None and len(runs.starts) == 1000
    runs.share(1000)
    runs.same((0, 10), (0, 10), CPU)
    assert len(pickle.dumps(runs)) < 100_000


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[\[1, 8\], \[2, 8\]\]"):
        DocumentRuns.of(torch.zeros(1, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.bool))

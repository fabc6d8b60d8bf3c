"""Ranks that read data of unknown length end together, or say at once that they do not."""

from __future__ import annotations

import pytest

from ds_trainer.data.lockstep import Lockstep
from ds_trainer.utils.errors import ConfigError
from tests.support.pool import pool


def read(lengths: list[int], window: int, marks: list[int]) -> list[int] | str:
    import torch.distributed as dist

    rank = dist.get_rank()
    steps = Lockstep(((number, marks[rank] if number == 2 else 0) for number in range(lengths[rank])), window)
    sizes = []
    try:
        while ahead := steps.ahead():
            sizes.append(ahead)
            assert [next(steps) for _ in range(ahead)] == list(range(sum(sizes) - ahead, sum(sizes)))
    except ConfigError as error:
        return str(error)
    return sizes


@pytest.mark.parametrize(("length", "sizes"), [(5, [2, 2, 1]), (4, [2, 2]), (0, [])])
def test_ranks_agree_in_windows_until_the_end(length: int, sizes: list[int]) -> None:
    assert pool(2).run(read, [length] * 2, 2, [0, 0]) == [sizes] * 2


@pytest.mark.parametrize("lengths", [[5, 6], [6, 5], [3, 6]])
def test_different_lengths_are_rejected_on_all_ranks(lengths: list[int]) -> None:
    for message in pool(2).run(read, lengths, 2, [0, 0]):
        assert "The ranks' data has different lengths" in message


def test_different_data_is_rejected_on_all_ranks() -> None:
    assert pool(2).run(read, [5, 5], 2, [9, 9]) == [[2, 2, 1]] * 2
    assert all(isinstance(message, str) for message in pool(2).run(read, [5, 5], 2, [9, 8]))


def test_the_data_is_not_read_beyond_its_end() -> None:
    """A source that has ended early is not begun again by another look."""
    reads = []

    def source() -> object:
        for number in range(3):
            reads.append(number)
            yield number, 0
        reads.append(-1)

    steps = Lockstep(source(), 2)  # type: ignore[arg-type]
    assert list(steps) == [0, 1, 2] and steps.ahead() == 0
    assert reads == [0, 1, 2, -1]
    steps = Lockstep(iter([(0, 0)]), 2)
    assert steps.ahead() == 1 and steps._ended

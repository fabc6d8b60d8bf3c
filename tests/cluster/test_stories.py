"""Jobs that are stopped in the middle, by everything that stops jobs: each goes on by itself, and at the end has the
weights of a run that nobody stopped, bit for bit.
"""

from __future__ import annotations

import pytest

from tests.cluster.long_training import STEPS
from tests.cluster.stories import Story

pytestmark = pytest.mark.slurm


def test_a_whole_run_makes_every_step_once(stories: dict[str, Story]) -> None:
    stories["whole"].end()
    assert stories["whole"].trace() == [(1, step) for step in range(1, STEPS + 1)]


def test_time_limits_in_a_chain(stories: dict[str, Story]) -> None:
    story = stories["limit"]
    assert story.end()["Restarts"] == "3", story.text()
    assert [step for _, step in story.trace()] == list(range(1, STEPS + 1))  # each start goes on at the next step
    assert {start for start, _ in story.trace()} == {1, 2, 3, 4}
    assert story.text().count("asking the ranks to stop at a checkpoint") == 3
    assert story.weights() == stories["whole"].weights()


def test_preemption_by_a_partition_of_higher_priority(stories: dict[str, Story]) -> None:
    story = stories["preempted"]
    assert story.end()["Restarts"] == "1", story.text()
    assert [step for _, step in story.trace()] == list(range(1, STEPS + 1))
    assert {start for start, _ in story.trace()} == {1, 2}
    assert story.weights() == stories["whole"].weights()


@pytest.mark.parametrize("name", ["crash", "first_crash"])
def test_a_node_dies(stories: dict[str, Story], name: str) -> None:
    """With the batch script on another node, and with it."""
    story = stories[name]
    assert story.end()["Restarts"] == "1", story.text()
    steps = {start: [step for by, step in story.trace() if by == start] for start in (1, 2)}
    again = steps[2][0]
    assert again > 1 and again % 5 == 1  # from the last checkpoint
    assert steps[1][-1] >= again - 1 and steps[2] == list(range(again, STEPS + 1))
    assert story.weights() == stories["whole"].weights()


@pytest.mark.parametrize("name", ["slurmd", "first_slurmd"])
def test_a_slurmd_dies_and_its_ranks_do_not(stories: dict[str, Story], name: str) -> None:
    """SLURM starts the job again on other nodes. With the batch script elsewhere, the ranks that nobody sees end when
    the others do; with it, they are asked to stop at a checkpoint, and the new ones go on from there."""
    story = stories[name]
    assert story.end()["Restarts"] == "1", story.text()
    assert story.weights() == stories["whole"].weights()
    starts = [start for start, _ in story.trace()]
    assert starts == sorted(starts), "never two at a time"
    steps = {start: [step for by, step in story.trace() if by == start] for start in (1, 2)}
    assert steps[2] == list(range(steps[2][0], STEPS + 1))
    if name == "slurmd":
        assert 1 < steps[2][0] <= steps[1][-1] + 1
    else:
        assert steps[2][0] == steps[1][-1] + 1, "from the checkpoint at which they stopped"
        assert "that start goes on with it" in story.text()


def test_other_weights_are_noticed(stories: dict[str, Story]) -> None:
    changed = bytearray(stories["whole"].weights())
    changed[-1] ^= 1
    assert bytes(changed) != stories["whole"].weights()

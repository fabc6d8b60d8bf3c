"""Jobs that are stopped in the middle, by everything that stops jobs: each goes on by itself, and at the end has the
weights of a run that nobody stopped, bit for bit.

They run side by side on machines of their own, since they mostly wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import environment, sbatch_words, users_folder
from tests.cluster.machines import Cluster, why_not

pytestmark = pytest.mark.slurm

STEPS = 150


class Story:
    """One job of two ranks: ``tests/cluster/long_training.py`` by one of the scripts."""

    def __init__(self, cluster: Cluster, folder: Path, name: str, script: str, nodes: str, starts: int) -> None:
        self.cluster, self.script, self.nodes, self.starts = cluster, script, nodes, starts
        self.log, self.output = folder / f"{name}.log", folder / name
        self._folder = folder
        self.job = 0

    def begin(self, *words: str, save_steps: int = 0) -> Story:
        gpus = 2 if self.script == "one_node" else 1
        size = sbatch_words(self.log, 1, f"--gpus-per-node={gpus}", f"--nodelist={self.nodes}", *words)
        training = ["tests/cluster/long_training.py", str(self.output), str(self.starts), str(save_steps)]
        command = [*size, f"launch/{self.script}.sbatch", *training]
        self.job = self.cluster.submit(*command, cwd=self._folder, env=environment())
        return self

    def trace(self) -> list[tuple[int, int]]:
        """Start and step of every step, in the order in which they were made."""
        path = self.output / "trace"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines]

    def wait_until_at_work(self) -> None:
        self.cluster.wait_until(lambda: len(self.trace()) > 12, 90, self.text)

    def end(self) -> dict[str, str]:
        told = self.cluster.wait_for(self.job, 200, self.log)
        assert told["JobState"] == "COMPLETED", self.text()
        return told

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else "nothing"

    def weights(self) -> bytes:
        return (self.output / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Story]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no cluster inside this machine: {reason}")
    folder = users_folder(tmp_path_factory.mktemp("stories"))
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), nodes=8)
    try:
        yield _begin(cluster, folder)
    finally:
        cluster.close()


def _begin(cluster: Cluster, folder: Path) -> dict[str, Story]:
    """All stories, with the accident of each."""
    limit = Story(cluster, folder, "limit", "nodes_srun", "node[1-2]", 4)
    preempted = Story(cluster, folder, "preempted", "nodes_torchrun", "node[3-4]", 2)
    crash = Story(cluster, folder, "crash", "nodes_srun", "node[5-6]", 2)
    first_crash = Story(cluster, folder, "first_crash", "one_node", "node7", 2)
    # SLURM looks every half minute: the signal comes 10 to 40 seconds after the start.
    limit.begin("--time=2", "--signal=B:USR1@80")
    limit.wait_until_at_work()
    crash.begin(save_steps=5)
    first_crash.begin(save_steps=5)
    preempted.begin()
    crash.wait_until_at_work()
    cluster.crash("node6")
    first_crash.wait_until_at_work()
    cluster.crash("node7")
    preempted.wait_until_at_work()
    urgent = ["--partition=high", f"--nodelist={preempted.nodes}", "--exclusive", "--nodes=2", "--wrap", "sleep 2"]
    cluster.submit(*urgent, cwd=folder)
    whole = Story(cluster, folder, "whole", "one_node", "node8", 1).begin()
    whole.end()
    for node in ("node6", "node7"):
        cluster.boot(node)
    return {"limit": limit, "preempted": preempted, "crash": crash, "first_crash": first_crash, "whole": whole}


def test_a_whole_run_makes_every_step_once(stories: dict[str, Story]) -> None:
    assert stories["whole"].trace() == [(1, step) for step in range(1, STEPS + 1)]


def test_time_limits_in_a_chain(stories: dict[str, Story]) -> None:
    story = stories["limit"]
    assert int(story.end()["Restarts"]) >= 3, story.text()
    assert [step for _, step in story.trace()] == list(range(1, STEPS + 1))  # each start goes on at the next step
    assert len({start for start, _ in story.trace()}) >= 4, story.text()
    assert story.text().count("asking the ranks to stop at a checkpoint") >= 3
    assert story.weights() == stories["whole"].weights()


def test_preemption_by_a_partition_of_higher_priority(stories: dict[str, Story]) -> None:
    story = stories["preempted"]
    assert story.end()["Restarts"] == "1", story.text()
    assert [step for _, step in story.trace()] == list(range(1, STEPS + 1))
    assert {start for start, _ in story.trace()} == {1, 2}
    assert story.weights() == stories["whole"].weights()


@pytest.mark.parametrize("name", ["crash", "first_crash"])
def test_a_node_dies(stories: dict[str, Story], name: str) -> None:
    """With the batch script on another node, and with it: then SLURM has to notice."""
    story = stories[name]
    assert story.end()["Restarts"] == "1", story.text()
    assert ("a node does not answer" in story.text()) == (name == "crash")
    steps = {start: [step for by, step in story.trace() if by == start] for start in (1, 2)}
    again = steps[2][0]
    assert again > 1 and again % 5 == 1  # from the last checkpoint
    assert steps[1][-1] >= again - 1 and steps[2] == list(range(again, STEPS + 1))
    assert story.weights() == stories["whole"].weights()


def test_other_weights_are_noticed(stories: dict[str, Story]) -> None:
    changed = bytearray(stories["whole"].weights())
    changed[-1] ^= 1
    assert bytes(changed) != stories["whole"].weights()

"""Jobs that are stopped in the middle, in every way: each resumes automatically, and at the end has the
weights of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import pytest

from tests.cluster.long_training import STEPS
from tests.cluster.scenarios import FAULTS, PATIENCE, Scenario

pytestmark = pytest.mark.slurm


def test_an_uninterrupted_run_takes_every_step_once(scenarios: dict[str, Scenario]) -> None:
    scenarios["whole"].end()
    assert scenarios["whole"].trace() == [(1, step) for step in range(1, STEPS + 1)]


def test_time_limits_in_a_chain(scenarios: dict[str, Scenario]) -> None:
    scenario = scenarios["limit"]
    assert scenario.end()["Restarts"] == "3", scenario.text()
    assert [step for _, step in scenario.trace()] == list(range(1, STEPS + 1))  # each start continues at the next step
    assert {start for start, _ in scenario.trace()} == {1, 2, 3, 4}
    assert scenario.text().count("asking the ranks to stop at a checkpoint") == 3
    assert scenario.weights() == scenarios["whole"].weights()


def test_preemption_by_a_partition_of_higher_priority(scenarios: dict[str, Scenario]) -> None:
    scenario = scenarios["preempted"]
    assert scenario.end()["Restarts"] == "1", scenario.text()
    assert [step for _, step in scenario.trace()] == list(range(1, STEPS + 1))
    assert {start for start, _ in scenario.trace()} == {1, 2}
    assert scenario.weights() == scenarios["whole"].weights()


@pytest.mark.parametrize("name", ["crash", "first_crash"])
def test_a_node_dies(scenarios: dict[str, Scenario], name: str) -> None:
    """With the batch script on another node, and with it."""
    scenario = scenarios[name]
    assert scenario.end()["Restarts"] == "1", scenario.text()
    steps = {start: [step for by, step in scenario.trace() if by == start] for start in (1, 2)}
    resumed_steps = steps[2][0]
    assert resumed_steps > 1 and resumed_steps % 5 == 1  # from the last checkpoint
    assert steps[1][-1] >= resumed_steps - 1 and steps[2] == list(range(resumed_steps, STEPS + 1))
    assert scenario.weights() == scenarios["whole"].weights()


@pytest.mark.parametrize("name", ["slurmd", "first_slurmd"])
def test_a_slurmd_dies_and_its_ranks_do_not(scenarios: dict[str, Scenario], name: str) -> None:
    """SLURM starts the job again on other nodes. With the batch script elsewhere, the ranks that nobody sees end when
    the others do; with it, they are asked to stop at a checkpoint, and the new ones resume from there."""
    scenario = scenarios[name]
    assert scenario.end()["Restarts"] == "1", scenario.text()
    assert scenario.weights() == scenarios["whole"].weights()
    starts = [start for start, _ in scenario.trace()]
    assert starts == sorted(starts), "never two at a time"
    steps = {start: [step for by, step in scenario.trace() if by == start] for start in (1, 2)}
    assert steps[2] == list(range(steps[2][0], STEPS + 1))
    if name == "slurmd":
        assert 1 < steps[2][0] <= steps[1][-1] + 1
    else:
        assert steps[2][0] == steps[1][-1] + 1, "from the checkpoint at which they stopped"
        assert "that run continues it" in scenario.text()


@pytest.mark.matrix
def test_a_chain_of_faults(scenarios: dict[str, Scenario]) -> None:
    """Each start continues from a checkpoint of the one before; a machine that fails twice is replaced by the spare
    one, and where there is none it is used again; an error of the program ends the job.

    Not in CI: on a busy machine SLURM 22.05 sometimes ends the step of the start after an exclusion, half a minute
    after the requeue. The job goes on, but its third start then makes no step.
    """
    whole = scenarios["whole"]
    scenario = Scenario(whole.cluster, whole.output.parent, "faults", "nodes_srun", "node[16-18]", 99)
    scenario.begin(save_steps=5, faults=FAULTS).accident.set_result(None)
    assert scenario.end("FAILED", 2 * PATIENCE)["Restarts"] == "4", scenario.text()
    steps = {start: [step for by, step in scenario.trace() if by == start] for start in range(1, 6)}
    assert all(steps.values()), scenario.text()
    for start in range(2, 6):
        assert steps[start][0] % 5 == 1 and steps[start - 1][0] < steps[start][0] <= steps[start - 1][-1] + 1
    places = dict(line.split() for line in (scenario.output / "faults").read_text(encoding="utf-8").splitlines())
    assert places == dict(zip(FAULTS, ["node17", "node17", "node18", "node18", "node18"], strict=True))
    for text in (
        "SIGABRT; fault 1 of node17 (rank 1)",
        "SIGSEGV; fault 2 of node17 (rank 1)",
        "excluded from this job: node17",
        "; fault 1 of node18 (rank 1)",
        "does not respond (stopped, dead",
        "SIGKILL; fault 2 of node18 (rank 1)",
        "not excluded: node18, since partition main has only",
        "rank 1 on node18: ValueError: of the program",
    ):
        assert text in scenario.text(), scenario.text()


def test_control_different_weights_are_detected(scenarios: dict[str, Scenario]) -> None:
    changed = bytearray(scenarios["whole"].weights())
    changed[-1] ^= 1
    assert bytes(changed) != scenarios["whole"].weights()

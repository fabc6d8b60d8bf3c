"""Jobs that are stopped in the middle, in every way: each resumes automatically, and at the end has the
weights of an uninterrupted run, bit for bit.
"""

from __future__ import annotations

import pytest

from tests.cluster.long_training import STEPS
from tests.cluster.scenarios import CHAIN, PATIENCE, SECOND_CHAIN, Scenario

pytestmark = [pytest.mark.extended, pytest.mark.slurm]


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


def resumed_each_time(scenario: Scenario, starts: int) -> None:
    """Each start continues from a checkpoint of the one before."""
    steps = {start: [step for by, step in scenario.trace() if by == start] for start in range(1, starts + 1)}
    assert all(steps.values()), scenario.text()
    for start in range(2, starts + 1):
        assert steps[start][0] % 5 == 1 and steps[start - 1][0] < steps[start][0] <= steps[start - 1][-1] + 1


def test_a_chain_of_faults(scenarios: dict[str, Scenario]) -> None:
    """A machine that fails twice is replaced, a machine that stops too, and an error of the program ends the job. The
    processes of the machine that was stopped end once it continues."""
    scenario = scenarios["chain"]
    assert scenario.end("FAILED", 2 * PATIENCE)["Restarts"] == "3", scenario.text()
    resumed_each_time(scenario, 4)
    places = scenario.places()
    assert list(places) == list(CHAIN) and places["SIGABRT"] == places["SIGSEGV"] == "node17"
    assert {places["node"], places["error"]} == {"node18", "node19"}
    for text in (
        "SIGABRT; fault 1 of node17 (rank 1)",
        "SIGSEGV; fault 2 of node17 (rank 1)",
        "excluded from this job: node17",
        f"rank 1 on {places['error']}: ValueError: of the program",
    ):
        assert text in scenario.text(), scenario.text()
    scenario.cluster.run(places["node"], "kill", "-CONT", "--", "-1")
    ranks = ("pgrep", "-f", f"long_training.py {scenario.output}")
    scenario.cluster.wait_until(
        lambda: scenario.cluster.run(places["node"], *ranks, check=False).returncode == 1, PATIENCE, scenario.text
    )


def test_a_chain_on_a_machine_without_another(scenarios: dict[str, Scenario]) -> None:
    """A rank that hangs is named by the others; a machine that fails twice is used again if there is no other one; too
    little memory of the GPU would come back and ends the job."""
    scenario = scenarios["second_chain"]
    assert scenario.end("FAILED", 2 * PATIENCE)["Restarts"] == "2", scenario.text()
    resumed_each_time(scenario, 3)
    assert scenario.places() == dict.fromkeys(SECOND_CHAIN, "node21")
    for text in (
        "; fault 1 of node21 (rank 1)",
        "does not respond (stopped, dead",
        "SIGKILL; fault 2 of node21 (rank 1)",
        "not excluded: node21, since partition main has only",
        "rank 1 on node21: ds_trainer.training.out_of_memory.OutOfMemory: Out of memory on rank 1 in step",
    ):
        assert text in scenario.text(), scenario.text()


def test_control_different_weights_are_detected(scenarios: dict[str, Scenario]) -> None:
    changed = bytearray(scenarios["whole"].weights())
    changed[-1] ^= 1
    assert bytes(changed) != scenarios["whole"].weights()

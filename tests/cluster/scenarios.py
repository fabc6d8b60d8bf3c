"""Jobs of two ranks that something stops in the middle, each with its accident in a thread of its own.

They mostly wait, so they run side by side, on machines of their own, while other tests of this folder run.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.cluster.jobs import environment, sbatch_arguments, users_folder
from tests.cluster.long_training import FREE_STEPS
from tests.cluster.machines import Cluster

PATIENCE = 240  # seconds; all of them start at once, on two cores
NODES = 21
CHAIN = ("SIGABRT", "SIGSEGV", "node", "error")
SECOND_CHAIN = ("stop", "SIGKILL", "memory")


class Scenario:
    """One job of two ranks: ``tests/cluster/long_training.py`` by one of the scripts."""

    def __init__(self, cluster: Cluster, folder: Path, name: str, script: str, nodes: str, starts: int) -> None:
        self.cluster, self.script, self.nodes, self.starts = cluster, script, nodes, starts
        self.log, self.output = folder / f"{name}.log", folder / name
        self._folder = folder
        self.job = 0
        self.accident: Future[Any] = Future()

    def begin(self, *argv: str, save_steps: int = 0, faults: Sequence[str] = ()) -> Scenario:
        gpus = 2 if self.script == "one_node" else 1
        size = sbatch_arguments(self.log, 1, f"--gpus-per-node={gpus}", self._place(), *argv)
        training = ["tests/cluster/long_training.py", str(self.output), str(self.starts), str(save_steps), *faults]
        command = [*size, f"launch/{self.script}.sbatch", *training]
        self.job = self.cluster.submit(*command, cwd=self._folder, env=environment())
        return self

    def _place(self) -> str:
        """Its nodes, the first of them at first: all others are excluded, and ``nodes`` may name one to spare."""
        own = set(self.cluster.hub("scontrol", "show", "hostnames", self.nodes).split())
        return f"--exclude={','.join(name for name in self.cluster.nodes if name not in own)}"

    def trace(self) -> list[tuple[int, int]]:
        """Start and step of every step, in the order in which they were made."""
        path = self.output / "trace"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines]

    def wait_until_at_work(self, start: int = 1) -> None:
        """Until a start has made so many steps that it crawls."""

        def steps() -> int:
            return sum(by == start for by, _ in self.trace())

        self.cluster.wait_until(lambda: steps() > FREE_STEPS, PATIENCE, self.text)

    def wait_until_restarted(self, times: int) -> None:
        def restarts() -> int:
            return int(self.cluster.job(self.job)["Restarts"])

        self.cluster.wait_until(lambda: restarts() >= times, PATIENCE, self.text)

    def end(self, state: str = "COMPLETED", patience: int = PATIENCE) -> dict[str, str]:
        """What SLURM says of the job at its end, which is ``state``."""
        self.accident.result(timeout=PATIENCE)
        job_state = self.cluster.wait_for(self.job, patience, self.log)
        assert job_state["JobState"] == state, self.text()
        return job_state

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else "nothing"

    def places(self) -> dict[str, str]:
        """The machine that each fault came to."""
        lines = (self.output / "faults").read_text(encoding="utf-8").splitlines()
        return dict(tuple(line.split()) for line in lines)

    def weights(self) -> bytes:
        return (self.output / "final" / "model.safetensors").read_bytes()


def start_scenarios(cluster: Cluster, folder: Path) -> dict[str, Scenario]:
    """Begin all of them; ``folder`` is empty."""
    folder = users_folder(folder)
    scenarios = {
        "whole": Scenario(cluster, folder, "whole", "one_node", "node8", 1),
        "limit": Scenario(cluster, folder, "limit", "nodes_srun", "node[1-2]", 4),
        "preempted": Scenario(cluster, folder, "preempted", "nodes_torchrun", "node[3-4]", 2),
        "crash": Scenario(cluster, folder, "crash", "nodes_srun", "node[5-6,9]", 2),
        "first_crash": Scenario(cluster, folder, "first_crash", "one_node", "node[7,10]", 2),
        "slurmd": Scenario(cluster, folder, "slurmd", "nodes_srun", "node[11-13]", 2),
        "first_slurmd": Scenario(cluster, folder, "first_slurmd", "one_node", "node[14-15]", 2),
        "chain": Scenario(cluster, folder, "chain", "nodes_srun", "node[16-19]", 99),
        "second_chain": Scenario(cluster, folder, "second_chain", "nodes_srun", "node[20-21]", 99),
    }
    accidents = {
        "whole": lambda scenario: scenario.begin(),
        "limit": _reach_time_limits,
        "preempted": _be_preempted,
        "crash": lambda scenario: _lose_node(scenario, "node6"),
        "first_crash": lambda scenario: _lose_node(scenario, "node7"),
        "slurmd": lambda scenario: _kill_slurmd(scenario, "node12"),
        "first_slurmd": lambda scenario: _kill_slurmd(scenario, "node14"),
        "chain": lambda scenario: _suffer(scenario, CHAIN, scenarios["whole"]),
        "second_chain": lambda scenario: _suffer(scenario, SECOND_CHAIN, scenarios["whole"]),
    }
    threads = ThreadPoolExecutor(len(scenarios))
    for name, accident in accidents.items():
        scenarios[name].accident = threads.submit(accident, scenarios[name])
    threads.shutdown(wait=False)
    return scenarios


def _reach_time_limits(scenario: Scenario) -> None:
    """SLURM looks at the limits every half minute. The limit is set low once the ranks are at work, and high for the
    next start, so that no start is too slow for its limit."""
    scenario.begin("--time=60", "--signal=B:USR1@170")
    for start in range(1, scenario.starts):
        scenario.wait_until_at_work(start)
        minutes = int(scenario.cluster.job(scenario.job)["RunTime"].split(":")[1]) + 2
        scenario.cluster.hub("scontrol", "update", f"JobId={scenario.job}", f"TimeLimit={minutes}")
        scenario.wait_until_restarted(start)
        scenario.cluster.hub("scontrol", "update", f"JobId={scenario.job}", "TimeLimit=60")


def _be_preempted(scenario: Scenario) -> None:
    scenario.begin()
    scenario.wait_until_at_work()
    argv = ["--partition=high", f"--nodelist={scenario.nodes}", "--exclusive", "--nodes=2", "--wrap", "sleep 2"]
    scenario.cluster.submit("--output=/dev/null", *argv, env=environment())


def _lose_node(scenario: Scenario, node: str) -> None:
    """It is off for good: the job continues with its spare node."""
    scenario.begin(save_steps=5)
    scenario.wait_until_at_work()
    scenario.cluster.crash(node)


def _kill_slurmd(scenario: Scenario, node: str) -> None:
    """SLURM loses sight of the node, whose ranks continue."""
    scenario.begin(save_steps=5)
    scenario.wait_until_at_work()
    scenario.cluster.run(node, "pkill", "-KILL", "-x", "slurmd")


def _suffer(scenario: Scenario, faults: Sequence[str], first: Scenario) -> None:
    """One fault after the other, once the rush of the first jobs is over."""
    first.end()
    scenario.begin(save_steps=5, faults=faults)

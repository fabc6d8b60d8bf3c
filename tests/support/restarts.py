"""One run under ``torchrun --max-restarts`` whose ranks are killed again and again, and what is seen of it meanwhile.

    python -m tests.support.restarts --kills 50 --out benchmarks/results/restarts.json

All of it is looked at from outside: processes by a mark in their environment, so that none is missed; steps by
files to which every rank adds a line at each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ds_trainer.utils.ranks import free_port

ROOT = Path(__file__).parents[2]
MARK = "DS_TRAINER_TEST_RUN"
SHARED_MEMORY = "/dev/shm/"
_POLL = 0.02


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        kills: how often a rank is killed.
        steps: of the whole run.
        interval: steps between two checkpoints.
        in_background: whether training continues while a checkpoint is written.
        in_start_up: share of the kills that hit a rank before its first step.
        standalone: rendezvous on a port that torchrun chooses (c10d) instead of a given ``--master-port``.
        seed: of who is killed when.
        limit: seconds that the whole run may take.
    """

    kills: int
    steps: int
    interval: int
    in_background: bool = True
    in_start_up: float = 0.15
    standalone: bool = False
    seed: int = 0
    limit: float = 3600.0


class AttemptStart(NamedTuple):
    """The start of training on a rank: the attempt of the launcher, the step, the time."""

    attempt: int
    step: int
    time: float


@dataclass
class Kill:
    """What came of one SIGKILL.

    Attributes:
        rank: whose.
        at: ``"step"`` or ``"start-up"``.
        step: the last one that a rank had done.
        kept: the newest complete checkpoint of that moment.
        resumed: the step from which the next attempt went on; -1 where that one was killed before.
        lost: steps that were done again.
        survivors: seconds until the last of the other ranks had ended.
        back: seconds until all ranks were in the next attempt's training.
    """

    rank: int
    at: str
    step: int
    kept: int
    survivors: float
    resumed: int = -1
    lost: int = 0
    back: float = -1.0


@dataclass
class Outcome:
    """What was seen of a run.

    Attributes:
        code: with which the launcher ended.
        seconds: from its start to its end.
        kills: in their order.
        orphans: processes that were left.
        shared_memory: files that ranks had in ``/dev/shm`` and that are still there.
        hidden: what is left of unfinished work in the output directory.
        records: of the ranks; of the last attempt.
        output: of all processes, its end.
    """

    code: int
    seconds: float
    kills: list[Kill]
    orphans: list[str]
    shared_memory: list[str]
    hidden: list[str]
    records: list[dict[str, Any]]
    output: str


# -- who watches and kills ---------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A launcher and its ranks.

    Args:
        directory: for all that they write.
        plan: what is run.
    """

    directory: Path
    plan: Plan
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.shared: set[str] = set()
        self.began = time.monotonic()
        plan = self.plan
        rendezvous = ["--standalone"] if plan.standalone else ["--master-port", str(free_port())]
        restarts = ["--max-restarts", str(plan.kills + 3)]
        module = ["-m", "tests.support.restarted_rank", str(self.directory), "--steps", str(plan.steps)]
        module += ["--interval", str(plan.interval), *([] if plan.in_background else ["--waiting"])]
        torchrun = str(Path(sys.executable).parent / "torchrun")
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")
        kept = {name: value for name, value in os.environ.items() if name not in launcher}
        variables = {MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_TRAINER_AUTO_RESUME": "1"}
        self.log = self.directory / "output.txt"
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [torchrun, *rendezvous, "--nproc-per-node", "2", *restarts, *module],
                env={**kept, **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # -- what is seen

    def marked(self) -> list[psutil.Process]:
        """All processes of this run, wherever they hang; the dead ones not."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """The living processes of the present attempt, by rank."""
        found = {}
        try:
            for child in psutil.Process(self.process.pid).children():
                try:
                    rank = child.environ().get("RANK")
                    if rank is not None and child.status() != psutil.STATUS_ZOMBIE:
                        found[int(rank)] = child
                        self.shared |= {m.path for m in child.memory_maps() if m.path.startswith(SHARED_MEMORY)}
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
        except psutil.NoSuchProcess:
            pass
        return found

    def progress(self) -> list[tuple[list[AttemptStart], int]]:
        """Of each rank: its beginnings, and the last step that it did since."""
        found = []
        for rank in range(2):
            path = self.directory / f"diary-{rank}"
            starts, last = [], 0
            for line in path.read_text().splitlines() if path.exists() else []:
                event, attempt, step, when = line.split()
                last = int(step)
                if event == "begin":
                    starts.append(AttemptStart(int(attempt), int(step), float(when)))
            found.append((starts, last))
        return found

    def last_step(self) -> int:
        """The last step that any rank has done in the present attempt."""
        return max(last for _, last in self.progress())

    def kept(self) -> int:
        """The step of the newest checkpoint."""
        out = self.directory / "out"
        names = [path.name for path in out.glob("checkpoint-*")] if out.is_dir() else []
        return max((int(name.split("-")[1]) for name in names), default=0)

    # -- what is done

    def wait_for(self, what: Any, text: str, seconds: float = 300.0) -> None:
        """Until it is so.

        Raises:
            AssertionError: the launcher has ended, or it took too long.
        """
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, f"torchrun ended with {self.process.poll()} ({text}):\n{self.tail()}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {text}:\n{self.tail()}"
            assert time.monotonic() - self.began < self.plan.limit, f"the run takes too long: {text}"
            time.sleep(_POLL)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def training(self, attempt: int) -> bool:
        """Whether both ranks have done a step in an attempt."""
        return all(b and b[-1].attempt == attempt and last > b[-1].step for b, last in self.progress())

    def kill(self, chance: random.Random, index: int, in_start_up: bool) -> Kill:
        """Kill a rank at a random moment, and wait until the other one has ended."""
        plan = self.plan
        self.wait_for(lambda: len(self.ranks()) == 2, f"both ranks of attempt {index} are there")
        if in_start_up:
            time.sleep(chance.uniform(0.0, 8.0))
        else:
            target = int((index + chance.random()) * (plan.steps - 2 * plan.interval) / plan.kills)
            self.wait_for(lambda: self.training(index), f"attempt {index} trains")
            self.wait_for(lambda: self.last_step() >= target, f"step {target} in attempt {index}")
            time.sleep(chance.uniform(0.0, 0.25))
        ranks = self.ranks()
        rank = chance.randrange(2)
        trained = [bool(b) and b[-1].attempt == index for b, _ in self.progress()]
        kept = self.kept()
        ranks[rank].send_signal(signal.SIGKILL)
        started = time.monotonic()
        self.wait_for(lambda: not any(one.is_running() and one.status() != "zombie" for one in ranks.values()), "ends")
        survivors = time.monotonic() - started
        return Kill(rank, "step" if any(trained) else "start-up", self.last_step(), kept, survivors)

    def run(self) -> Outcome:
        """Run with the planned number of kills, and then to the end."""
        plan, chance = self.plan, random.Random(self.plan.seed)
        kills: list[Kill] = []
        moments: list[float] = []
        starting = set(chance.sample(range(plan.kills), round(plan.in_start_up * plan.kills)))
        try:
            for index in range(plan.kills):
                kill = self.kill(chance, index, index in starting)
                moments.append(time.time() - kill.survivors)
                kills.append(kill)
                print(f"kill {index + 1}: {kill}", file=sys.stderr, flush=True)
        except BaseException:
            self.end_all()
            raise
        return self.end(kills, moments)

    def end(self, kills: list[Kill], moments: list[float]) -> Outcome:
        """Wait for the end of the launcher; what was seen.

        Raises:
            subprocess.TimeoutExpired: it took too long.
        """
        try:
            remaining = max(1.0, self.plan.limit - (time.monotonic() - self.began))
            threading.Thread(target=self._watch_shared_memory, daemon=True).start()
            code = self.process.wait(timeout=remaining)
            seconds = time.monotonic() - self.began
            deadline = time.monotonic() + 5.0
            while (left_over := self.marked()) and time.monotonic() < deadline:
                time.sleep(_POLL)
            orphans = [f"{one.pid} {' '.join(one.cmdline())}" for one in left_over]
        finally:
            self.end_all()
        # What was lost by each kill, and how long it took to be back; from the diaries, when all is over.
        progress = self.progress()
        step = 0  # done before the kill, as far as it was not lost already
        for index, (kill, moment) in enumerate(zip(kills, moments, strict=True)):
            step = max(step, kill.step) if kill.at == "start-up" else kill.step
            after = [[b for b in starts if b.attempt == index + 1] for starts, _ in progress]
            if all(after):
                kill.resumed = after[0][0].step
                kill.back = max(one[0].time for one in after) - moment
                kill.lost = step - kill.resumed
                step = kill.resumed
        records = [json.loads(path.read_text()) for path in sorted(self.directory.glob("story-*.json"))]
        return Outcome(
            code,
            seconds,
            kills,
            orphans,
            sorted(name for name in self.shared if os.path.exists(name)),
            sorted(path.name for path in (self.directory / "out").glob(".*")),
            records,
            self.tail(),
        )

    def end_all(self) -> None:
        """Kill all remaining processes."""
        for one in self.marked():
            one.kill()
        self.process.wait()

    def _watch_shared_memory(self) -> None:
        while self.process.poll() is None:
            self.ranks()  # for what they have in shared memory
            time.sleep(1.0)


def digest(outcome: Outcome) -> dict[str, Any]:
    """Figures for people."""
    back = [kill.back for kill in outcome.kills if kill.back >= 0]
    return {
        "kills": len(outcome.kills),
        "ranks": [sum(kill.rank == rank for kill in outcome.kills) for rank in range(2)],
        "in start-up": sum(kill.at == "start-up" for kill in outcome.kills),
        "steps lost, most": max(kill.lost for kill in outcome.kills),
        "steps lost, mean": round(statistics.mean(kill.lost for kill in outcome.kills), 1),
        "steps lost, all": sum(kill.lost for kill in outcome.kills),
        "survivors end after, s, median": round(statistics.median(kill.survivors for kill in outcome.kills), 2),
        "survivors end after, s, most": round(max(kill.survivors for kill in outcome.kills), 2),
        "back in training after, s, median": round(statistics.median(back), 1),
        "back in training after, s, most": round(max(back), 1),
        "seconds": round(outcome.seconds),
        "exit code": outcome.code,
        "orphans": outcome.orphans,
        "shared memory": outcome.shared_memory,
        "hidden": outcome.hidden,
    }


def main() -> int:
    """Parse the command line and run. Exit code 1 where the run did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--waiting", action="store_true", help="checkpoints while training waits")
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all")
    parser.add_argument("--out", type=Path, help="where to write what was seen, as JSON")
    options = parser.parse_args()
    plan = Plan(options.kills, options.steps, options.interval, not options.waiting, seed=options.seed)
    plan = Plan(**{**asdict(plan), "standalone": options.standalone, "limit": options.limit})
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = Run(Path(folder) / "whole", Plan(**{**asdict(plan), "kills": 0})).run()
        outcome = Run(Path(folder) / "killed", plan).run()
    same = outcome.records == uninterrupted.records and len(uninterrupted.records) == 2
    found = {**digest(outcome), "bit for bit the same": same}
    print(json.dumps(found, indent=2))
    if options.out:
        about = {"python": platform.python_version(), "cpu_cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        kills = [asdict(kill) for kill in outcome.kills]
        result = {"environment": about, "plan": asdict(plan), "figures": found, "kills": kills}
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if same and outcome.code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

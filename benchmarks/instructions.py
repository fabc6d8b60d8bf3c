"""Counts what a step costs: the instructions that the training thread of a rank executes, by valgrind.

The loops are those of ``overhead.py``, one after the other in one process per rank. Times of a few milliseconds differ
from run to run by as much as the loops do. Instructions do not: a step executes the same ones each time, whatever else
runs on the machine. They say how much work a loop adds; they do not say how long a rank waits for others, and a cache
miss counts like a hit. Only the thread that trains is counted, not the kernel, other threads (of gloo, of the hang
watchdog) and what runs every few seconds.

    python benchmarks/instructions.py --out benchmarks/results/instructions.json    needs valgrind; half an hour
    python benchmarks/instructions.py --world 1 --zero 1                            a part of it
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from kept_results import Results
from overhead import MODELS, Case, Tokens, bare_loop, build_model, our_trainer, their_trainer
from overhead_results import BARE, COUNTING, OURS, THEIRS

from ds_trainer.utils.ranks import free_port

LOOPS = (BARE, COUNTING, OURS, THEIRS)
WARMUP, STEPS = 24, 20  # optimizer steps before the counted ones (the first 20 are watched), and those


class Counted(Exception):
    """Leaves a loop after the counted steps."""


def count(name: str, case: Case, directory: str) -> None:
    """Run one loop of ``case`` on this rank, under valgrind, which writes a file when the counted steps are done."""
    data, model, steps = Tokens(case), build_model(MODELS[case.model]), 0

    def done() -> None:
        nonlocal steps
        steps += 1
        if steps == WARMUP:
            _control("-i", "on")
        if steps == WARMUP + STEPS:
            _control("-i", "off")
            _control(f"--dump={name}")
            raise Counted

    ours = our_trainer(case, model, data, f"{directory}/ours", done)
    config = ours._ds_trainer.compiled.to_dict()
    try:
        if name == OURS:
            ours.train()
        elif name == THEIRS:
            their_trainer(case, model, data, f"{directory}/theirs", config, done).train()
        else:
            bare_loop(case, model, data, config, done, counts=name == COUNTING)
    except Counted:
        return
    sys.exit(f"{name} ended before its last step")


def _control(*arguments: str) -> None:
    subprocess.run(["callgrind_control", *arguments, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def counted(case: Case) -> dict[str, float]:
    """Millions of instructions of a micro-step, by loop: the mean over the ranks."""
    with tempfile.TemporaryDirectory() as directory:
        valgrind = ["valgrind", "--tool=callgrind", "--separate-threads=yes", "--instr-atstart=no", "--quiet"]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(case.world)}
        ranks = []
        for rank in range(case.world):
            command = [*valgrind, f"--callgrind-out-file={directory}/rank{rank}", sys.executable, __file__]
            command += ["--directory", directory, "--world", str(case.world), "--zero", str(case.stage)]
            command += ["--accumulation", str(case.accumulation)]
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(f"{directory}/log{rank}", "wb") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for rank, process in enumerate(ranks):
            if process.wait():
                text = Path(f"{directory}/log{rank}").read_text(errors="replace")
                sys.exit(f"Rank {rank} of {case.world} failed:\n{text[-3000:]}")
        found = {}
        for part, name in enumerate(LOOPS, start=1):
            totals = [total(Path(directory) / f"rank{rank}.{part}-01") for rank in range(case.world)]
            found[name] = round(sum(totals) / case.world / STEPS / case.accumulation / 1e6, 3)
    return found


def total(path: Path) -> int:
    """The instructions in a file of valgrind."""
    line = next(line for line in path.read_text().splitlines() if line.startswith("totals:"))
    return int(line.split()[1])


def case_of(world: int, stage: int, accumulation: int) -> Case:
    """A case of ``overhead.py`` whose learning rate does not reach zero within the counted steps."""
    return Case("tiny", world, stage, accumulation, rounds=10, block=5, warmup=0)


def table(cases: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| ranks | ZeRO | accum. | " + " | ".join(LOOPS) + " |", "|---" * (3 + len(LOOPS)) + "|"]
    for case in cases:
        base = case[COUNTING]
        cells = [f"{case[BARE]:.2f}", f"{base:.2f}"]
        cells += [f"{case[name] - base:+.2f} ({100 * (case[name] / base - 1):+.1f} %)" for name in LOOPS[2:]]
        lines.append(f"| {case['world']} | {case['stage']} | {case['accumulation']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", nargs="+", type=int, default=[1, 2], help="numbers of ranks")
    parser.add_argument("--zero", nargs="+", type=int, default=[1, 3], help="ZeRO stages")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1], help="micro-batches a step")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--directory", help=argparse.SUPPRESS)  # how it starts itself on every rank
    options = parser.parse_args()
    cases = [case_of(*about) for about in product(options.world, options.zero, options.accumulation)]
    if options.directory:
        from ds_trainer.engine.process_group import start_process_group

        start_process_group("cpu")
        for name in LOOPS:
            count(name, cases[0], options.directory)
        return 0
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed: apt-get install valgrind")
    results = Results(options.out, "cpu", warmup=WARMUP, steps=STEPS)
    for case in cases:
        found = counted(case)
        results.add({"world": case.world, "stage": case.stage, "accumulation": case.accumulation, **found})
    print(table(results.cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures the cost of the hang watchdog and the straggler report per step, by paired measurements in one training.

One training of a small Llama runs blocks of steps with both enabled, without them, and again without them (a control
that shows the measurement error). Their order is random in each round and the same on all ranks. Other load on the
machine affects all three in the same way, so ratios *within a round* are meaningful even if single times are not.
Everything is disabled in the blocks without: threads, the timing of collectives, and the notifications of the loop. The
watchdog polls ten times per second here, fifty times as often as with its default limit of 300 seconds.

    python benchmarks/health.py --out benchmarks/results/health.json      about two minutes on two cores
    python benchmarks/health.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from overhead import MODELS, Case, Tokens, build_model, collate
from turns import Moment

from ds_trainer.monitor.throughput import TimedIterator
from ds_trainer.utils.ranks import free_port

ON, OFF, CONTROL = "on", "off", "off again"
WAYS = (ON, OFF, CONTROL)
SEED, WARMUP = 42, 10
LIMIT = 2.0  # of a hang: the watchdog looks every twentieth of it


class NoHealth:
    """Watches nothing."""

    def __enter__(self) -> NoHealth:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def begin_data(self, iterator: Any) -> Any:
        return TimedIterator(iterator)

    def begin_compute(self) -> None:
        pass

    def begin_update(self) -> None:
        pass

    def step_done(self, step: int, data_seconds: float) -> None:
        pass

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        yield


def measure(ranks: int, rounds: int, block: int, model: str) -> dict[str, Any]:
    """All rounds, on this rank; the median seconds of a step of each block, by way and clock."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.utils import distributed

    start_process_group("cpu")
    draw = random.Random(SEED)
    schedule = [way for _ in range(rounds) for way in draw.sample(WAYS, len(WAYS))]
    steps = WARMUP + block * len(schedule)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}

    class Switched(Trainer):
        """Its loop is watched, or not."""

        def begin_health(self) -> Any:
            return Switch(self)

    class Switch:
        """Stands for what watches at the moment."""

        def __init__(self, trainer: Any) -> None:
            self.trainer, self.now = trainer, NoHealth()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.now, name)

        def __enter__(self) -> Any:
            self.trainer.switch = self

        def __exit__(self, *args: Any) -> None:
            self.now.__exit__(None, None, None)

        def turn(self, way: str) -> None:
            self.now.__exit__(None, None, None)
            self.now = super(Switched, self.trainer).begin_health() if way == ON else NoHealth()
            self.now.__enter__()

    class Clock(TrainerCallback):
        """Changes the way after each block, outside of what is timed."""

        def __init__(self) -> None:
            self.moments: list[Moment] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            done = state.global_step - WARMUP
            self.moments.append(Moment.now())
            if done < 0 or done % block:
                return
            if done > 0:
                of = [later.since(earlier) for earlier, later in zip(self.moments, self.moments[1:], strict=False)]
                way = schedule[done // block - 1]
                times[way].append((statistics.mean(one.wall for one in of), statistics.mean(one.cpu for one in of)))
            if done // block < len(schedule):
                trainer.switch.turn(schedule[done // block])
                distributed.barrier()
            self.moments = [Moment.now()]

    case = Case(model, ranks, 1, 1, 0, 0, steps)
    with tempfile.TemporaryDirectory() as directory:
        args = TrainingArguments(
            directory,
            per_device_train_batch_size=MODELS[model].micro_batch,
            max_steps=steps,
            logging_steps=10**9,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            zero_stage=1,
            hang_timeout=LIMIT,
            straggler_steps=10,
        )
        trainer: Any = Switched(build_model(MODELS[model]), args, data_collator=collate, train_dataset=Tokens(case))
        trainer.callback_handler.add_callback(Clock())
        trainer.train()
    of_ranks = np.array(distributed.gather_objects([times[way] for way in WAYS]))  # ranks x ways x rounds x clocks
    mean = of_ranks.mean(axis=0)
    result: dict[str, Any] = {"ranks": ranks, "model": model, "rounds": rounds, "block": block}
    for number, clock in enumerate(("wall", "cpu")):
        on, off, control = (mean[way, :, number] for way in range(3))
        result[clock] = {
            "step_ms": 1000 * float(np.median(off)),
            "on_over_off": interval(on / off),
            "control_over_off": interval(control / off),
        }
    return result


def interval(ratios: Any) -> list[float]:
    """Median of the ratios with the 95 % interval of that median, by the bootstrap: lower end, median, upper end."""
    generator = np.random.default_rng(SEED)
    medians = np.median(generator.choice(ratios, (2000, len(ratios))), axis=1)
    return [float(np.quantile(medians, 0.025)), float(np.median(ratios)), float(np.quantile(medians, 0.975))]


def table(results: list[dict[str, Any]]) -> str:
    """A line a case and clock."""
    lines = ["| model | ranks | clock | ms a step | on / off | off again / off |", "|---|---|---|---|---|---|"]
    for one in results:
        for clock in ("wall", "cpu"):
            found = one[clock]
            on, control = (
                f"{middle:.4f} [{low:.4f}, {high:.4f}]"
                for low, middle, high in (found["on_over_off"], found["control_over_off"])
            )
            lines.append(f"| {one['model']} | {one['ranks']} | {clock} | {found['step_ms']:.2f} | {on} | {control} |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see it work")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # how it starts itself on every rank
    options = parser.parse_args()
    if options.case:
        result = measure(**json.loads(options.case))
        if os.environ["RANK"] == "0":
            options.out.write_text(json.dumps(result), encoding="utf-8")
        return 0
    results: list[dict[str, Any]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        part = Path(directory) / "case.json"
        for ranks in options.ranks:
            case = {
                "ranks": ranks,
                "rounds": 3 if options.quick else options.rounds,
                "block": 20,
                "model": options.model,
            }
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
            command = [sys.executable, *launcher, __file__, "--case", json.dumps(case), "--out", str(part)]
            subprocess.run(command, check=True, env=environment)
            results.append(json.loads(part.read_text(encoding="utf-8")))
            print(table(results[-1:]), flush=True)
    print("\n" + table(results))
    if options.out:
        options.out.write_text(json.dumps({"cases": results}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

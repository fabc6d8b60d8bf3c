"""Measures the cost of detecting non-finite losses and gradients, and spikes, as a fraction of a step.

Four trainings of the same model take turns in one process per rank (see ``overhead.py`` for the method): without
detection ("off": the guard of the engine is disabled, and bf16 uses DeepSpeed's own pass over the gradients), a copy of
it as a control, the default, and the default with ``loss_spike_factor``. The result is the ratio within a round; the
ratio of the control shows the measurement error.

    python benchmarks/divergence.py            a few minutes
    python benchmarks/divergence.py --quick    does it run here?
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from overhead import MODELS, Case, Tokens, arguments, build_model, collate
from turns import Turns

from ds_trainer.utils.ranks import free_port

OFF, CONTROL, ON, SPIKES = "off", "off again", "on", "on, spikes too"
LOOPS = (OFF, CONTROL, ON, SPIKES)
CLOCKS = ("wall", "cpu")


class Line(NamedTuple):
    """A row of the table."""

    model: str
    world: int
    stage: int
    bf16: bool
    rounds: int
    block: int


LINES = (
    Line("tiny", 1, 0, False, 40, 5),
    Line("tiny", 1, 1, False, 40, 5),
    Line("tiny", 2, 1, False, 40, 5),
    Line("tiny", 2, 1, True, 40, 5),
    Line("tiny", 2, 2, True, 40, 5),
    Line("tiny", 2, 3, False, 40, 5),
    Line("50m", 1, 0, False, 20, 1),
)


def trainer_of(name: str, line: Line, case: Case, data: Tokens, directory: str, done: Callable[[], None]) -> Any:
    """One of the four."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments
    from ds_trainer.engine import training_engine
    from ds_trainer.training.assembly import Assembly
    from ds_trainer.training.loop.divergence_guard import DivergenceGuard, Update

    class StepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            done()

    class Blind(DivergenceGuard):
        """Steps, and looks at nothing."""

        def __init__(self, guard: DivergenceGuard) -> None:
            self.incidents = guard.incidents

        def begin_step(self) -> None:
            pass

        def before_update(self, contributions: Any) -> bool:
            return False

        def after_update(self, applied: bool, batches: Any, contributions: Any) -> Update:
            return Update.APPLIED if applied else Update.SKIPPED

    class BlindAssembly(Assembly):
        def build_engine(self, num_training_steps: int) -> None:
            with mock.patch.object(training_engine, "enable_overflow_checks", lambda optimizer: None):
                super().build_engine(num_training_steps)
            self.engines.training.guarded = False
            make_loop = self.setup.train_loop

            def train_loop(run: Any, checkpointer: Any, *given: Any) -> Any:
                checkpointer.guard = Blind(checkpointer.guard)
                return make_loop(run, checkpointer, *given)

            self.setup.train_loop = train_loop  # type: ignore[method-assign]

    class Measured(Trainer):
        _ds_assembly = BlindAssembly

    blind = name in (OFF, CONTROL)
    more: dict[str, Any] = {"loss_spike_factor": 10.0} if name == SPIKES else {}
    args = TrainingArguments(
        **arguments(case, f"{directory}/{LOOPS.index(name)}"), zero_stage=line.stage, bf16=line.bf16, **more
    )
    model = build_model(MODELS[line.model])
    trainer = (Measured if blind else Trainer)(model, args, data_collator=collate, train_dataset=data)
    trainer.callback_handler.add_callback(StepEnd())
    return trainer


def measure(line: Line) -> dict[str, Any]:
    """All four on this rank; the results, on every rank."""
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.utils import distributed

    start_process_group("cpu")
    case = Case(line.model, line.world, line.stage, 1, line.rounds, line.block)
    draw = random.Random(0)
    schedule = [(name, case.warmup) for name in LOOPS]
    for _ in range(line.rounds):
        schedule += [(name, line.block) for name in draw.sample(LOOPS, len(LOOPS))]
    turns = Turns(schedule + [(name, 0) for name in LOOPS], distributed.barrier)
    data = Tokens(case)

    def loop(name: str, directory: str) -> None:
        turns.enter(name)
        try:
            trainer = trainer_of(name, line, case, data, directory, lambda: turns.step_done(name))
            trainer.train()
            losses[name] = float(next(p for p in trainer.model.parameters()).detach().double().abs().sum())
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the others would wait forever
        turns.leave()

    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        threads = [threading.Thread(target=loop, args=(name, directory)) for name in LOOPS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    own = {clock: [_times(turns, name, clock) for name in LOOPS] for clock in CLOCKS}
    told = distributed.gather_objects(own)
    result: dict[str, Any] = {**line._asdict(), "same_work": len(set(losses.values())) == 1}
    for clock in CLOCKS:
        mean = np.mean([times[clock] for times in told], axis=0)
        result[clock] = {"off_ms": float(np.median(mean[0])), **_ratios(mean)}
    return result


def _times(turns: Turns, name: str, clock: str) -> list[float]:
    """Milliseconds a step: the median of each turn after the warm-up."""
    blocks = [np.median([getattr(step, clock) for step in steps]) for who, steps in turns.times if who == name]
    return [1000 * float(seconds) for seconds in blocks[1:]]


def _ratios(times: Any) -> dict[str, list[float]]:
    """Median of the ratios to "off" within a round, and its 95 % interval by resampling."""
    found = {}
    for index, name in enumerate(LOOPS[1:], 1):
        ratios = times[index] / times[0]
        resampled = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
        found[name] = [float(np.median(ratios)), *map(float, np.quantile(resampled, [0.025, 0.975]))]
    return found


def table(results: list[dict[str, Any]], clock: str) -> str:
    """The results as Markdown."""
    lines = [
        f"| model | ranks | ZeRO | precision | off, ms | {' | '.join(LOOPS[1:])} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        cells = [one["model"], str(one["world"]), str(one["stage"]), "bf16" if one["bf16"] else "fp32"]
        cells.append(f"{one[clock]['off_ms']:.2f}")
        cells += ["{:.3f} [{:.3f}, {:.3f}]".format(*one[clock][name]) for name in LOOPS[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run; the exit code is 1 where two trainings did not do the same work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see it work, not to believe the numbers")
    parser.add_argument("--lines", nargs="+", type=int, default=list(range(len(LINES))), help="rows of the table")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--line", type=int, help=argparse.SUPPRESS)  # how it starts itself on every rank
    options = parser.parse_args()
    if options.line is not None:
        line = LINES[options.line]
        result = measure(line._replace(rounds=3) if options.quick else line)
        if os.environ["RANK"] == "0":
            options.out.write_text(json.dumps(result), encoding="utf-8")
        return 0
    results = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        part = Path(directory) / "line.json"
        for index in options.lines:
            launcher = [
                "torch.distributed.run",
                f"--nproc-per-node={LINES[index].world}",
                f"--master-port={free_port()}",
            ]
            command = [sys.executable, "-m", *launcher, __file__, "--line", str(index), "--out", str(part)]
            subprocess.run([*command, *(["--quick"] if options.quick else [])], check=True, env=environment)
            results.append(json.loads(part.read_text(encoding="utf-8")))
            print(table(results[-1:], "wall"), table(results[-1:], "cpu"), sep="\n", flush=True)
    for clock in CLOCKS:
        print(f"\n{clock}:\n\n{table(results, clock)}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"cpu_cores": os.cpu_count(), "lines": results}, indent=2) + "\n")
    return 0 if all(one["same_work"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Measures whether anything grows during a long training.

The training has twenty thousand fast steps of a tiny perceptron, with everything that happens between steps: logs every
10 steps, evaluations every 500, background checkpoints every 250, of which two are kept. Every 100 steps each rank
records its memory, open files, threads, files in /dev/shm, files on the disk and CPU time, and less often the number of
live tensors. A linear fit over the samples after the first tenth (start-up) gives the growth per 10,000 steps.

``TrainerState.log_history`` grows by design with every log. Its size is measured and subtracted, but not the memory for
its text while a checkpoint is written; ``--no-logs`` distinguishes that from a leak.

    python benchmarks/soak.py --out benchmarks/results/soak.json     the table of docs/explanation/resilience.md
    python benchmarks/soak.py --quick                                1,500 steps: does it run here?
    python benchmarks/soak.py --quick --leak                         a control that leaks 16 kB per step
    python benchmarks/soak.py --no-logs                              another control without logs
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from ds_trainer import Trainer, TrainerCallback, TrainingArguments
from ds_trainer.utils.ranks import free_port

STEPS, QUICK_STEPS = 20_000, 1_500
SAMPLE_EVERY, COUNT_EVERY = 100, 1000
START = 0.1  # of the steps: caches fill, thread pools start, allocators take their arenas
LEAK_BYTES = 16_384

# What may be the growth per 10,000 steps. A short run sees a coarse step of the allocator as a slope.
BOUNDS = {
    "rss_mb": 3.0,
    "open_files": 0.5,
    "threads": 0.5,
    "children": 0.5,
    "shm_mb": 0.0,
    "tensors": 2.0,
    "disk_mb": 2.0,
    "cpu_ms": 0.5,
}
_COARSE = {"rss_mb": 60.0, "open_files": 5.0, "threads": 25.0, "tensors": 200.0, "disk_mb": 20.0, "cpu_ms": 10.0}
QUICK_BOUNDS = {**BOUNDS, **_COARSE}
TITLES = {
    "rss_mb": "memory (RSS), MB",
    "log_mb": "of which log_history, MB",
    "open_files": "open files",
    "threads": "threads",
    "children": "child processes",
    "shm_mb": "in /dev/shm, MB",
    "tensors": "live tensors",
    "disk_mb": "output directory, MB",
    "cpu_ms": "CPU time of a step, ms",
    "step_ms": "median step, ms",
    "save_ms": "longest step, ms",
}


class Perceptron(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prediction = self.layers(x).squeeze(-1)
        return nn.functional.mse_loss(prediction, labels), prediction


class Sampler(TrainerCallback):
    """Looks at its own process.

    Args:
        path: a line a sample, JSON.
        every: steps between two.
        count_every: steps between two counts of tensors.
        leak: keep something at every step.
    """

    def __init__(self, path: Path, every: int, count_every: int, leak: bool) -> None:
        self.path, self.every, self.count_every = path, every, count_every
        self.kept: list[torch.Tensor] | None = [] if leak else None
        self.process = psutil.Process()
        self.durations: list[float] = []
        self.last, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.durations.append(now - self.last)
        if self.kept is not None:
            self.kept.append(torch.ones(LEAK_BYTES // 4))
        if state.global_step % self.every == 0:
            self.sample(Path(args.output_dir), state)
            self.durations.clear()
            self.cpu = time.process_time()
        self.last = time.perf_counter()

    def sample(self, output_dir: Path, state: Any) -> None:
        everybody = [self.process, *self.process.children(recursive=True)]
        found = {
            "step": state.global_step,
            "rss_mb": sum(one.memory_info().rss for one in everybody) / 1e6,
            "log_mb": deep_size(state.log_history) / 1e6,
            "open_files": sum(one.num_fds() for one in everybody),
            "threads": sum(one.num_threads() for one in everybody),
            "children": len(everybody) - 1,
            "shm_mb": sum(m.rss for m in self.process.memory_maps() if m.path.startswith("/dev/shm/")) / 1e6,
            "disk_mb": disk_use(output_dir) / 1e6,
            "cpu_ms": 1e3 * (time.process_time() - self.cpu) / len(self.durations),
            "step_ms": 1e3 * statistics.median(self.durations),
            "save_ms": 1e3 * max(self.durations),
        }
        if state.global_step % self.count_every == 0:
            gc.collect()
            found["tensors"] = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(found) + "\n")


def deep_size(log_history: list[dict[str, Any]]) -> int:
    """Bytes of a list of plain records, of which keys are shared; from its last records, which are like the others."""
    some = log_history[-200:]
    if not some:
        return 0
    each = sum(sys.getsizeof(one) + sum(sys.getsizeof(value) for value in one.values()) for one in some) / len(some)
    return sys.getsizeof(log_history) + round(each * len(log_history))


def disk_use(directory: Path) -> int:
    """Bytes in a directory; files that are removed during the count are skipped."""
    found = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                found += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return found


def train(directory: Path, steps: int, leak: bool, logs: bool = True) -> None:
    """One rank."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    quick = steps < STEPS
    xs = torch.randn(512, 16)
    rows = [{"x": x, "labels": x.sum()} for x in xs]
    args = TrainingArguments(
        str(directory / "out"),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=10 if logs else steps,
        eval_strategy="steps",
        eval_steps=100 if quick else 500,
        per_device_eval_batch_size=16,
        save_steps=50 if quick else 250,
        save_total_limit=2,
        zero_stage=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    every, count_every = (50, 100) if quick else (SAMPLE_EVERY, COUNT_EVERY)
    samples = directory / f"rank{os.environ.get('RANK', '0')}.jsonl"
    sampler = Sampler(samples, every, count_every, leak)
    trainer = Trainer(Perceptron(), args, train_dataset=rows, eval_dataset=rows[:64], callbacks=[sampler])
    trainer.train()


def soak(ranks: int, steps: int, leak: bool = False, logs: bool = True) -> dict[str, Any]:
    """One training of so many ranks, each a process; what they saw of themselves."""
    port = free_port()
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        began = time.monotonic()
        with open(Path(folder) / "output.txt", "w+", encoding="utf-8") as output:
            for rank in range(ranks):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
                environment = {**os.environ, **{name: str(value) for name, value in {**own, **place}.items()}}
                command = [sys.executable, __file__, "--rank-in", folder, "--steps", str(steps)]
                command += ["--leak"] if leak else []
                command += [] if logs else ["--no-logs"]
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            codes = [process.wait() for process in processes]
            if any(codes):
                output.seek(0)
                raise RuntimeError(f"ranks ended with {codes}:\n{output.read()[-4000:]}")
        seconds = time.monotonic() - began
        samples = [
            [json.loads(line) for line in (Path(folder) / f"rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(ranks)
        ]
    left = [name for name in set(os.listdir("/dev/shm")) - before if f"_{port}_" in name]
    return {"ranks": ranks, "steps": steps, "seconds": seconds, "left_in_shm": left, **summary(samples, steps)}


def summary(samples: list[list[dict[str, float]]], steps: int) -> dict[str, Any]:
    """Sums over ranks at some moments, and slopes; the verdict."""
    merged = [merge(list(of_ranks)) for of_ranks in zip(*samples, strict=True)]
    after = [one for one in merged if one["step"] >= START * steps]
    slopes = {name: slope(after, name) for name in TITLES}
    slopes["rss_mb less log_mb"] = slopes["rss_mb"] - slopes["log_mb"]
    bounds = BOUNDS if steps >= STEPS else QUICK_BOUNDS
    ranks = len(samples)
    grows = [
        f"{TITLES[name]}: {found:+.2f} per 10,000 steps, more than {ranks * bound:g}"
        for name, bound in bounds.items()
        if (found := slopes["rss_mb less log_mb" if name == "rss_mb" else name]) > ranks * bound
    ]
    moments = {f"{share:.0%}": nearest(merged, share * steps) for share in (0.1, 0.25, 0.5, 1.0)}
    return {"moments": moments, "slopes": slopes, "grows": grows}


def merge(of_ranks: list[dict[str, float]]) -> dict[str, float]:
    """One sample of all ranks: what is counted a process is summed up."""
    names = of_ranks[0].keys()
    shared = ("step", "disk_mb", "cpu_ms", "step_ms", "save_ms")
    return {name: (max if name in shared else sum)(one[name] for one in of_ranks) for name in names}  # type: ignore[operator]


def slope(samples: list[dict[str, float]], name: str) -> float:
    """Growth per 10,000 steps: least squares."""
    points = [(one["step"], one[name]) for one in samples if name in one]
    if len(points) < 2:
        return 0.0
    return 1e4 * statistics.linear_regression(*zip(*points, strict=True)).slope


def nearest(samples: list[dict[str, float]], step: float) -> dict[str, float]:
    """The values nearest to a step, of each kind."""
    return {
        name: min((one for one in samples if name in one), key=lambda one: abs(one["step"] - step))[name]
        for name in TITLES
    }


def table(result: dict[str, Any]) -> str:
    """A line a kind."""
    moments = result["moments"]
    lines = [
        f"{result['ranks']} rank(s), {result['steps']} steps in {result['seconds']:.0f} s",
        "",
        f"| all ranks | {' | '.join(moments)} | per 10,000 steps |",
        "|---|" + "---|" * (len(moments) + 1),
    ]
    for name, title in TITLES.items():
        values = " | ".join(f"{one[name]:.1f}" for one in moments.values())
        lines.append(f"| {title} | {values} | {result['slopes'][name]:+.2f} |")
    lines.append("")
    lines.append("GROWS: " + "; ".join(result["grows"]) if result["grows"] else "within the bounds")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line and run. Exit code 1 where something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--leak", action="store_true", help="keep something at every step, to see that it is seen")
    parser.add_argument("--no-logs", action="store_true", help="log nothing but evaluations")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, help="another number of steps")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    if options.rank_in is not None:
        train(options.rank_in, steps, options.leak, not options.no_logs)
        return 0
    load, results = os.getloadavg()[0], []
    for ranks in options.ranks:
        results.append(soak(ranks, steps, options.leak, not options.no_logs))
        print(table(results[-1]) + "\n", flush=True)
    if options.out:
        packages = {name: version(name) for name in ("torch", "deepspeed", "ds-trainer")}
        about = {"python": platform.python_version(), "cpu_cores": os.cpu_count(), "load_average": load, **packages}
        options.out.write_text(json.dumps({"environment": about, "runs": results}, indent=2) + "\n", encoding="utf-8")
    return int(any(one["grows"] or one["left_in_shm"] for one in results))


if __name__ == "__main__":
    sys.exit(main())

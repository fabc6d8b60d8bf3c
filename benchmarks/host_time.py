"""CPU time of a rank's host: creating an engine, a micro-batch, a step; by ZeRO stage and number of ranks.

    python benchmarks/host_time.py [--models 8B 70B ...] [--stages 0 1 2 3] [--ranks 8 64 ...] [--deepspeed 8 64 ...]

The model has the number of tensors of a real one, and tiny tensors, so that hardly anything is computed. The ranks are
those of torch's fake process group, so nothing is communicated. What remains is Python, DeepSpeed and torch: the time
for which a GPU waits if it is longer than its own. ``--deepspeed`` measures DeepSpeed's engine without this package
beside ours. Every engine has a process, and they take turns. ZeRO-3 gathers every matrix in both passes, and keeps
vectors, as with a real model.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_TRAINER_SELF_TEST", "never")
os.environ.setdefault("LOCAL_SIZE", "1")  # else DeepSpeed runs a process for each bucket on CPUs, to count devices

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.fake_world import Counts, fake_world

PHASES = ("creation", "micro-batch", "step")
WIDTH = 64  # the fake gather repeats the weights of this rank, so all weights are the same


class Shape(NamedTuple):
    """Layers of a model, and how many matrices and vectors a layer has."""

    layers: int
    matrices: int
    vectors: int = 2
    experts: int = 0
    """Modules of three matrices each, which ZeRO-3 gathers together."""


SHAPES = {
    "8B": Shape(32, 7),
    "70B": Shape(80, 7),
    "128 experts, stacked": Shape(48, 7, 4),  # as transformers stores Qwen3-30B-A3B
    "128 experts, 8 of 48 layers": Shape(8, 5, 4, 128),
}


class Layer(nn.Module):
    """A layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_Part(matrix=True) for _ in range(shape.matrices)])
        self.norms = nn.ModuleList([_Part(matrix=False) for _ in range(shape.vectors)])
        self.moe = Experts(shape.experts) if shape.experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each part once."""
        for part in (*self.parts, *self.norms):
            x = part(x)
        return x if self.moe is None else x + self.moe(x)


class _Part(nn.Module):
    def __init__(self, matrix: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((WIDTH, WIDTH) if matrix else WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if self.weight.dim() == 2 else x + self.weight


class Expert(nn.Module):
    """Three matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A gated MLP."""
        return self.down(self.gate(x) * self.up(x))


class Experts(nn.Module):
    """A router and experts, of which each gets all tokens."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, number, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(number)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A weighted sum."""
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Model(nn.Module):
    """An embedding, layers, a norm and a head; returns a loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm, self.head = _Part(matrix=False), nn.Linear(WIDTH, WIDTH, bias=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 1 / WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean square of the output."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float().square().mean()


@contextmanager
def host(shape: Shape, stage: int, ranks: int, deepspeeds: bool = False, device: str = "cpu") -> Iterator[_Host]:
    """Rank 0 of ``ranks`` with an engine that has taken two steps, as ZeRO-3 records the order of modules.

    With ``deepspeeds`` DeepSpeed's engine alone: nothing of this package has changed it.
    """
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    from ds_trainer import TrainingArguments
    from ds_trainer.config.compiler import compile_config
    from ds_trainer.engine import training_engine
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.parallel.layout import ParallelLayout

    torch.set_num_threads(1)
    with fake_world(ranks, Counts()), cheap_gathers(), tempfile.TemporaryDirectory() as directory:
        start_process_group(device)
        args = TrainingArguments(
            directory,
            zero_stage=stage,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            use_cpu=device == "cpu",
            bf16=True,
            deepspeed={
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage3_param_persistence_threshold": 2 * WIDTH},
            },
        )
        layout = ParallelLayout(ranks)
        config = compile_config(args, layout, device=device, client_optimizer="AdamW")
        engines: list[Any] = []

        def create(model: nn.Module) -> None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # else some steps are skipped: sums are fake
            if deepspeeds:
                engines.append(deepspeed.initialize(model=model, optimizer=optimizer, config=config.to_dict())[0])
            else:
                engines.append(training_engine.TrainingEngine(model, optimizer, config, layout))

        create(Model(Shape(1, 1)))  # imports
        if not deepspeeds:
            engines[0].close()
        model = Model(shape)
        found = {"tensors": sum(1 for _ in model.parameters()), "creation": _seconds(lambda: create(model))}
        engine = engines[1]
        tokens = torch.zeros(1, 4, dtype=torch.long, device=args.device)

        def pass_of_deepspeed() -> None:  # DeepSpeed counts the micro-batches of a step
            engine.backward(engine(tokens))
            engine.step()

        def micro_batch(last: bool = False) -> None:
            engine.begin_micro_batch(last)
            engine.backward(engine.deepspeed(tokens))

        def step() -> None:
            micro_batch(last=True)
            engine.step()

        phases = {"micro-batch": micro_batch, "step": step}
        if deepspeeds:
            phases = dict.fromkeys(phases, pass_of_deepspeed)
        for _ in range(2):
            for function in phases.values():
                function()
        assert (engine if deepspeeds else engine.deepspeed).skipped_steps == 0
        yield _Host(found, phases)
        if not deepspeeds:
            engine.close()


class _Host(NamedTuple):
    found: dict[str, float]
    """Number of tensors, and CPU seconds of the creation."""
    phases: dict[str, Callable[[], None]]
    """A micro-batch, and one with a step after it; called in turns."""


def measure(shape: Shape, stage: int, ranks: int, deepspeeds: bool = False, device: str = "cpu") -> dict[str, float]:
    """CPU seconds of each phase, on rank 0 of ``ranks``: the fastest of three."""
    with host(shape, stage, ranks, deepspeeds, device) as (found, phases):
        for _ in range(3):
            for name, function in phases.items():
                found[name] = min(found.get(name, float("inf")), _seconds(function))
    return found


@contextmanager
def cheap_gathers() -> Iterator[None]:
    """Inside, torch's fake gather is one copy, in place of one for each rank: that is not the trainer's time."""

    def gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        output_tensor.view(-1, input_tensor.numel()).copy_(input_tensor.flatten().clone())
        return SimpleNamespace(wait=lambda: None) if async_op else None

    real = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = gather
    try:
        yield
    finally:
        dist.all_gather_into_tensor = real


def _seconds(function: Callable[[], None]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def _serve(pipe: Any, arguments: tuple[Any, ...]) -> None:
    with host(*arguments) as (found, phases):
        pipe.send(found)
        while name := pipe.recv():
            pipe.send(_seconds(phases[name]))


def alternate(hosts: dict[Any, tuple[Any, ...]], rounds: int, turns: int, limit: float) -> dict[Any, dict[str, Any]]:
    """CPU seconds of each phase of ``hosts`` (arguments of :func:`host`), one after the other in alternating turns.

    Each has a process, which lives for a round: what the machine does besides affects all of them alike. A host that
    has used ``limit`` seconds has no further turns.
    """
    times: dict[Any, dict[str, Any]] = {one: {phase: [] for phase in PHASES} for one in hosts}
    context = multiprocessing.get_context("spawn" if "cuda" in {one[-1] for one in hosts.values()} else "fork")

    def goes_on(one: Any) -> bool:
        return sum(times[one]["micro-batch"] + times[one]["step"]) < limit

    for turn in range(rounds):
        pipes, processes = {}, []
        for one, arguments in hosts.items():
            if turn and not goes_on(one):
                continue
            pipes[one], theirs = context.Pipe()
            processes.append(context.Process(target=_serve, args=(theirs, arguments), daemon=True))
            processes[-1].start()
            theirs.close()
            found = pipes[one].recv()
            times[one]["tensors"] = found["tensors"]
            times[one]["creation"].append(found["creation"])
        for number in range(turns):
            order = list(pipes)
            for one in order if number % 2 else reversed(order):
                for phase in PHASES[1:] if goes_on(one) else ():
                    pipes[one].send(phase)
                    times[one][phase].append(pipes[one].recv())
        for one in pipes.values():
            one.send("")
        for process in processes:
            process.join()
    return times


def _quartiles(seconds: list[float]) -> list[float]:
    where = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    return [round(one, 5) for one in torch.tensor(seconds, dtype=torch.float64).quantile(where).tolist()]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["70B"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--deepspeed", nargs="+", type=int, default=[], help="numbers of ranks for DeepSpeed's engine")
    parser.add_argument("--rounds", type=int, default=2, help="how often each engine is created")
    parser.add_argument("--turns", type=int, default=10, help="micro-batches and steps in a round")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of a host, after which it has no more turns")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file, to which the lines are added")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import torch._inductor.compile_fx  # noqa: F401  # DeepSpeed's Muon imports it

        import ds_trainer.engine.training_engine  # noqa: F401  # once, before the forks

        gc.freeze()  # else some engines include a collection of all that is imported, 0.3 s
    print("CPU seconds: median (quartiles). Ratios of micro-batch and step: to the first line in the same turn.\n")
    print("| model | tensors | ZeRO | whose | ranks | creation | micro-batch | step | ratio | ratio |")
    print("|---|---:|---|---|---:|---:|---:|---:|---:|---:|")
    lines = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    for model, stage in itertools.product(options.models, options.stages):
        hosts = {
            (whose, ranks): (SHAPES[model], stage, ranks, whose == "DeepSpeed", options.device)
            for whose, numbers in (("ds_trainer", options.ranks), ("DeepSpeed", options.deepspeed))
            for ranks in numbers
        }
        times = alternate(hosts, options.rounds, options.turns, options.limit)
        first = next(iter(times.values()))
        for (whose, ranks), found in times.items():
            line: dict[str, Any] = {"model": model, "stage": stage, "ranks": ranks, "whose": whose}
            line |= {"tensors": found["tensors"], "turns": len(found["step"])}
            line |= {phase: _quartiles(found[phase]) for phase in PHASES}
            for phase in PHASES[1:]:
                pairs = zip(found[phase], first[phase], strict=False)
                line[f"{phase}, ratio"] = _quartiles([one / other for one, other in pairs])
            lines.append(line)
            shown = [_shown(line[name]) for name in (*PHASES, *(f"{phase}, ratio" for phase in PHASES[1:]))]
            print(f"| {model} | {line['tensors']} | {stage} | {whose} | {ranks:,} | {' | '.join(shown)} |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(lines, indent=1) + "\n")


def _shown(quartiles: list[float]) -> str:
    low, median, high = quartiles
    return f"{median:.3f} ({low:.3f}, {high:.3f})"


if __name__ == "__main__":
    main()

"""CPU time of a rank's host: creating an engine, a micro-batch, a step; by ZeRO stage and number of ranks.

    python benchmarks/host_time.py [--models 8B 70B ...] [--stages 0 1 2 3] [--ranks 8 64 ...] [--deepspeed] [--out F]

The model has the number of tensors of a real one, and tiny tensors, so that hardly anything is computed. The ranks are
those of torch's fake process group, so nothing is communicated. What remains is Python, DeepSpeed and torch: the time
for which a GPU waits if it is longer than its own. ``--deepspeed`` measures DeepSpeed's own collectives and hooks.
ZeRO-3 gathers every matrix in both passes, and keeps vectors, as with a real model.
"""

from __future__ import annotations

import argparse
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

REPEATS = 3
WIDTH = 64  # the fake gather repeats the first elements, so all matrices are constant


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
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1 / WIDTH) if matrix else torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if self.weight.dim() == 2 else x * self.weight


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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean square of the output."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float().square().mean()


def measure(shape: Shape, stage: int, ranks: int, deepspeeds: bool = False, device: str = "cpu") -> dict[str, float]:
    """CPU seconds of each phase, on rank 0 of ``ranks``."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    from ds_trainer import TrainingArguments
    from ds_trainer.config.compiler import compile_config
    from ds_trainer.engine import training_engine
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.engine.zero3.coalesced_collectives import leave_to_deepspeed
    from ds_trainer.parallel.layout import ParallelLayout

    leave_to_deepspeed(deepspeeds)
    if deepspeeds:
        training_engine.spare_host_time = lambda: None
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with fake_world(ranks, Counts()), cheap_gathers(), tempfile.TemporaryDirectory() as directory:
        start_process_group(device)
        model = Model(shape)
        found["tensors"] = sum(1 for _ in model.parameters())
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
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engines: list[Any] = []

        def create() -> None:
            engines.append(training_engine.TrainingEngine(model, optimizer, config, layout))

        found["creation"] = _seconds(create)
        (engine,) = engines
        tokens = torch.zeros(1, 4, dtype=torch.long, device=args.device)

        def micro_batch(last: bool = False) -> None:
            engine.begin_micro_batch(last)
            engine.backward(engine.deepspeed(tokens))

        def step() -> None:
            micro_batch(last=True)
            engine.step()

        for _ in range(2):  # ZeRO-3 records the order of modules
            micro_batch()
            step()
        for _ in range(REPEATS):
            for name, function in (("micro-batch", micro_batch), ("step", step)):
                found[name] = min(found.get(name, float("inf")), _seconds(function))
        engine.close()
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


def _in_a_process(arguments: tuple[Any, ...]) -> dict[str, float]:
    # A fork does not import the libraries again; with CUDA it cannot be used.
    with multiprocessing.get_context("fork" if arguments[-1] == "cpu" else "spawn").Pool(1) as processes:
        return processes.apply(measure, arguments)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["70B"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256, 1024, 4096])
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's own code, for comparison")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file, to which the lines are added")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import ds_trainer.engine.training_engine  # noqa: F401  # once, before the forks
    print("| model | tensors | ZeRO | whose | ranks | creation, s | micro-batch, s | step, s |")
    print("|---|---:|---|---|---:|---:|---:|---:|")
    lines = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    for model in options.models:
        for stage in options.stages:
            for ranks in options.ranks:
                found = _in_a_process((SHAPES[model], stage, ranks, options.deepspeed, options.device))
                whose = "DeepSpeed" if options.deepspeed else "ds_trainer"
                lines.append({"model": model, "stage": stage, "ranks": ranks, "whose": whose, **found})
                print(
                    f"| {model} | {found['tensors']:.0f} | {stage} | {whose} | {ranks:,} | {found['creation']:.2f} | "
                    f"{found['micro-batch']:.3f} | {found['step']:.3f} |",
                    flush=True,
                )
                if options.out:
                    options.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()

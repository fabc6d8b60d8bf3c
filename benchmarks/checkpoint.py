"""Measures the cost of a checkpoint, compared with other ways to save the same engine.

There is one training. Between its steps, the same state is saved in several ways, in a new random order in each round:
by us in the background, the same without the model's files, by us synchronously, by ``engine.save_checkpoint``, by the
function of ``transformers.Trainer`` on the same engine, by a bare ``torch.save`` of weights and optimizer, and by ``dd
conv=fsync``, which writes as many bytes as we do. Each save is on disk before the next one starts.

* *held up*: seconds without training: the call, and the next step's wait for the copy.
* *on the disk*: seconds until a power failure can do no harm. Files of savers that do not flush are flushed. Older
  checkpoints are removed between the saves.
* *slower steps*: how much longer steps took during a background save than before and after it, summed up. If all cores
  are busy with training, this is a cost in addition to the waiting.

    python benchmarks/checkpoint.py --out benchmarks/results/checkpoint.json    the table of docs/benchmarks.md
    python benchmarks/checkpoint.py --quick                                     one small model: a smoke test
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kept_results import Results
from torch import nn

from ds_trainer import Trainer, TrainingArguments
from ds_trainer.training.resume.background_saves import BackgroundSaves

BACKGROUND, WAITING = "ds_trainer, background", "ds_trainer, waiting"
NO_MODEL = "ds_trainer, background, no model files"  # save_model_in_checkpoints=False
DEEPSPEED, THEIRS, RAW, DD = "engine.save_checkpoint", "transformers.Trainer", "torch.save", "dd conv=fsync"
WAYS = (BACKGROUND, NO_MODEL, WAITING, DEEPSPEED, THEIRS, RAW, DD)
SEED = 0


@dataclass(frozen=True)
class Case:
    """One model."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    rounds: int
    zero_stage: int = 1
    bf16: bool = False
    sequence: int = 64
    batch: int = 1
    quiet_steps: int = 2
    """Minimum number of steps between two saves."""
    by_default: bool = True


CASES = {
    "cpu": [
        Case("10m", 256, 8, 4096, rounds=8),
        Case("50m", 512, 12, 8192, rounds=8),
        Case("50m bf16", 512, 12, 8192, rounds=8, bf16=True),
        Case("120m", 768, 16, 8192, rounds=8),
    ],
    "cuda": [
        Case("50m bf16", 512, 12, 8192, rounds=3, bf16=True, sequence=1024, quiet_steps=5),
        Case("400m bf16", 1024, 24, 32768, rounds=3, bf16=True, sequence=1024, batch=4, quiet_steps=5),
        # 1.35e9 parameters: 16 GB of float32 weights and moments, 2.7 GB of weights in bf16.
        Case("1b bf16", 2048, 16, 128256, 1, bf16=True, sequence=1024, batch=4, quiet_steps=5, by_default=False),
    ],
}


def build_model(case: Case) -> nn.Module:
    """A Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocabulary,
            hidden_size=case.hidden,
            intermediate_size=case.hidden * 11 // 4,
            num_hidden_layers=case.layers,
            num_attention_heads=case.hidden // 64,
            max_position_embeddings=case.sequence,
            use_cache=False,
        )
    )


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens; practically unlimited."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(self.case.vocabulary, (self.case.sequence,))
        return {"input_ids": tokens, "labels": tokens}


class Bench:
    """A trained engine, and all ways to save its state.

    Args:
        case: the model.
        directory: on the disk that is measured.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, case: Case, directory: Path, device: str) -> None:
        self.case, self.directory, self.device = case, directory, device
        args = TrainingArguments(
            str(directory / "ours"),
            per_device_train_batch_size=case.batch,
            max_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            zero_stage=case.zero_stage,
            bf16=case.bf16,
        )
        self.data = Tokens(case)
        with torch.device(device):  # which makes large weights faster than the CPU does
            model = build_model(case)
        self.trainer = Trainer(model, args, train_dataset=self.data)
        self.trainer.log = lambda *args, **kwargs: None  # printing is not measured
        self.trainer.train()
        self.engine = self.trainer.engine
        self.saver = self.trainer._ds_trainer.checkpointer
        handler, optimizer = self.trainer.callback_handler, self.trainer.optimizer
        self.saves = BackgroundSaves(self.engine, self.trainer._ds_trainer.device, frozenset(), handler, optimizer)
        self.bytes = 0
        self.theirs: Any = None

    def step(self) -> float:
        """Makes one optimizer step; returns its seconds."""
        start = time.perf_counter()
        rows = torch.utils.data.default_collate([self.data[0] for _ in range(self.case.batch)])
        batch = {name: tensor.to(self.trainer._ds_trainer.device) for name, tensor in rows.items()}
        self.engine.begin_micro_batch(last=True)
        self.engine.backward(self.engine.deepspeed(**batch).loss)
        self.engine.step()
        self.trainer.state.global_step += 1
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def turn(self, way: str) -> dict[str, float]:
        """Makes some steps, then one save."""
        os.sync()  # so that earlier writes and deletions do not count
        quiet = statistics.median(self.step() for _ in range(self.case.quiet_steps))
        result = self._background(way, quiet) if way in (BACKGROUND, NO_MODEL) else self._blocking(way)
        return {**result, "quiet_step": quiet}

    def _background(self, way: str, quiet: float) -> dict[str, float]:
        held, start = 0.0, time.perf_counter()
        outcomes: list[Any] = []
        state = dataclasses.replace(self.trainer.state)
        manager = self.saver.manager(state)
        if way == NO_MODEL:
            manager.model = None
        self.saves.begin(manager, self.saver.shared_files(state), (), state, outcomes.append)
        held += time.perf_counter() - start
        wait, waited = self.engine.before_step, 0.0

        def timed() -> None:
            nonlocal waited
            since = time.perf_counter()
            assert wait is not None
            wait()
            waited += time.perf_counter() - since

        self.engine.before_step = timed
        steps: list[float] = []
        flight = self.saves.in_flight
        assert flight is not None
        while not flight.save.done:
            steps.append(self.step())
        seconds = flight.save.ended - start
        self.saves.wait()
        size = size_of(outcomes[0])
        shutil.rmtree(outcomes[0])
        return {
            "held_up": held + waited,
            "waited_in_step": waited,
            "on_disk": seconds,
            "bytes": size,
            "slower": sum(steps) - len(steps) * quiet - waited,
            "steps": len(steps),
            "median_step": statistics.median(steps or [quiet]),
            "longest_step": max(steps or [quiet]),
        }

    def _blocking(self, way: str) -> dict[str, float]:
        target = self.directory / "turn"
        start = time.perf_counter()
        written = self._write(way, target)
        held = time.perf_counter() - start
        if way not in (WAITING, DD):
            flush(written)
        end = time.perf_counter() - start
        size = size_of(written)
        if way == WAITING:
            self.bytes = size
        (shutil.rmtree if written.is_dir() else Path.unlink)(written)
        return {"held_up": held, "on_disk": end, "bytes": size, "slower": 0.0}

    def _write(self, way: str, target: Path) -> Path:
        trainer = self.trainer
        if way == WAITING:
            path = trainer.save_checkpoint()
            assert path is not None
            return path
        if way == DEEPSPEED:
            self.engine.deepspeed.save_checkpoint(str(target))
        elif way == THEIRS:
            self.theirs = self.theirs or as_transformers(trainer, self.directory / "theirs", self.device)
            self.theirs.state.global_step = trainer.state.global_step
            self.theirs._save_checkpoint(trainer.model, trial=None)
            return Path(self.theirs.args.output_dir)
        elif way == RAW:
            state = {"model": trainer.model.state_dict(), "optimizer": self.engine.optimizer.state_dict()}
            torch.save(state, target)
        else:
            count = max(1, round(self.bytes / 2**24))
            command = ["dd", "if=/dev/zero", f"of={target}", "bs=16M", f"count={count}", "conv=fsync", "status=none"]
            subprocess.run(command, check=True)
        return target


def as_transformers(trainer: Trainer, target: Path, device: str) -> Any:
    """A ``transformers.Trainer`` on our engine: its own functions write its checkpoint."""
    import transformers
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

    args = transformers.TrainingArguments(str(target), use_cpu=device == "cpu", report_to="none")
    theirs: Any = transformers.Trainer(trainer.model, args)
    theirs.is_deepspeed_enabled = True
    theirs.deepspeed = theirs.model_wrapped = trainer.engine.deepspeed
    theirs.optimizer, theirs.lr_scheduler = trainer.optimizer, trainer.lr_scheduler
    # With DeepSpeed, accelerate does this below ZeRO-3.
    theirs.accelerator.get_state_dict = lambda engine: clone_tensors_for_torch_save(engine.module.state_dict())
    return theirs


def flush(path: Path) -> None:
    """Wait until a file, or everything in a directory, is on disk."""
    for one in [path, *path.rglob("*")]:
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def measure(case: Case, directory: Path, device: str, ways: list[str]) -> dict[str, Any]:
    """Measures all rounds of one case."""
    bench = Bench(case, directory, device)
    parameters = sum(p.numel() for p in bench.trainer.model.parameters())
    # The first save is always slow (the first in the background allocates the memory for its copy); dd needs the size.
    first = {way: bench.turn(way) for way in ([WAITING, *ways] if DD in ways else ways)}
    print(f"{case.name}: warm", file=sys.stderr, flush=True)
    order, turns = random.Random(SEED), {way: [] for way in ways}
    for _ in range(case.rounds):
        for way in order.sample(ways, len(ways)):
            turns[way].append(bench.turn(way))
            print(f"{case.name}: {way}: {turns[way][-1]}", file=sys.stderr, flush=True)
    bench.engine.close()
    return {**asdict(case), "parameters": parameters, "first": first, "turns": turns, **summary(turns)}


def summary(turns_by_way: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns medians of every way, and ratios between ways in the same round."""

    def ratios(of: str, to: str, key: str, scale: str | None = None) -> list[float]:
        values = []
        for one, other in zip(turns_by_way[of], turns_by_way[to], strict=True):
            a, b = (turn[key] / (turn[scale] if scale else 1.0) for turn in (one, other))
            values.append(a / b)
        return quartiles(values)

    return {
        "medians": {
            way: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
            for way, turns in turns_by_way.items()
        },
        "held_up_of": {way: ratios(BACKGROUND, way, "held_up") for way in turns_by_way if way not in (BACKGROUND, DD)},
        # seconds per byte of dd over those of the others: the fraction of dd's rate
        "rate_of_dd": {
            way: ratios(DD, way, "on_disk", "bytes") for way in turns_by_way if way != DD and DD in turns_by_way
        },
    }


def quartiles(values: list[float]) -> list[float]:
    """Returns lower quartile, median and upper quartile."""
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], statistics.median(ordered), ordered[-1 - len(ordered) // 4]]


def table(results: list[dict[str, Any]]) -> str:
    """A table with one row per case and way."""
    lines = [
        "| model | way | MB | held up, s | ours in the background takes | on the disk, s | MB/s | of dd's rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        for way, median in one["medians"].items():
            ratio = one["held_up_of"].get(way)
            rate = one["rate_of_dd"].get(way)
            lines.append(
                f"| {one['name']} | {way} | {median['bytes'] / 1e6:.0f} | {median['held_up']:.3f} | "
                f"{spread(ratio)} | {median['on_disk']:.2f} | {median['bytes'] / 1e6 / median['on_disk']:.0f} | "
                f"{spread(rate)} |"
            )
    return "\n".join(lines)


def spread(values: list[float] | None) -> str:
    """Formats a median with its quartiles."""
    return "" if values is None else f"{values[1]:.2f} ({values[0]:.2f} to {values[2]:.2f})"


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small model, as a smoke test")
    parser.add_argument("--device", choices=list(CASES), default="cpu", help="device to train on")
    names = sorted({case.name for cases in CASES.values() for case in cases})
    parser.add_argument("--only", nargs="+", choices=names, help="measure only these models")
    parser.add_argument(
        "--background", action="store_true", help="only saves in the background: how they slow training"
    )
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further model after this time")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.device == "cpu":
        torch.set_num_threads(1)
    of_device = CASES[options.device]
    cases = [replace(of_device[0], rounds=1)] if options.quick else of_device
    results = Results(options.out, options.device, options.minutes, load_average=os.getloadavg()[0])
    for case in cases:
        if results.out_of_time or not (case.name in options.only if options.only else case.by_default):
            continue
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            ways = [BACKGROUND, NO_MODEL] if options.background else list(WAYS)
            results.add(measure(case, Path(directory), options.device, ways))
        print(table(results.cases[-1:]), flush=True)
    print("\n" + table(results.cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())

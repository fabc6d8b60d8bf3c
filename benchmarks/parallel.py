"""Measures the cost of parallel layouts relative to data parallelism: step time, bytes sent; and ring, all-to-all.

All layouts train the same model on the same global batches in one process per rank, each with its own engine, and take
turns (``turns.py``). So the *ratio within a round* is meaningful on a busy machine, where single times are not. Ranks
that share the cores of one machine show the additional computation and messages of a layout. They do not show how much
memory it saves, nor the speed of a network. Bytes are counted, not estimated (``traffic.py``).

    python benchmarks/parallel.py                    layouts of 4 ranks, then ring against all-to-all
    python benchmarks/parallel.py --quick            the same with few rounds
    python benchmarks/parallel.py --world 8
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from traffic import traffic
from turns import Turns

from ds_trainer.utils.ranks import free_port

SEED, WARMUP = 42, 2
HIDDEN, LAYERS, HEADS, KEY_VALUE_HEADS, VOCABULARY = 128, 2, 8, 4, 512
GLOBAL_BATCH, SEQUENCE = 8, 256
AXES = ("dp", "cp", "sp", "tp")

Sizes = tuple[int, int, int, int]


def layouts(world: int) -> list[Sizes]:
    """Data parallelism first, then every factorization of ``world`` into dp x cp x sp x tp whose heads divide."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    found = [
        (world // (cp * sp * tp), cp, sp, tp)
        for cp in sizes
        for sp in sizes
        for tp in sizes
        if world % (cp * sp * tp) == 0 and KEY_VALUE_HEADS % tp == 0 and HEADS % (tp * sp) == 0
    ]
    return sorted(found, key=lambda axes: -axes[0])


def name_of(axes: Sizes) -> str:
    """``"dp2 sp2"``."""
    return " ".join(f"{axis}{size}" for axis, size in zip(AXES, axes, strict=True) if size > 1) or "dp1"


def build_model() -> torch.nn.Module:
    """The same weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN * 3,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_VALUE_HEADS,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
        )
    )


def step_times(rounds: int, stage: int) -> dict[str, Any]:
    """Seconds of each step of each layout, its losses and what a rank sent, on every rank."""
    from ds_trainer import Trainer, TrainerCallback, TrainingArguments
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.engine.topology import install_mpu, set_deepspeed_groups
    from ds_trainer.utils import distributed

    start_process_group("cpu")
    world = distributed.world_size()
    names = {name_of(axes): axes for axes in layouts(world)}
    draw = random.Random(SEED)
    schedule = [(name, WARMUP) for name in names]
    for _ in range(rounds):
        schedule += [(name, 1) for name in draw.sample(list(names), len(names))]
    schedule += [(name, 0) for name in names]
    turns = Turns(schedule, distributed.barrier)
    steps = WARMUP + rounds
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (steps * GLOBAL_BATCH, SEQUENCE), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    sent: dict[str, float] = {}
    losses: dict[str, list[float]] = {}

    def loop(name: str, directory: str) -> Callable[[], None]:
        dp, cp, sp, tp = names[name]

        class StepEnd(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 1:
                    self.counting = traffic()
                    self.counter = self.counting.__enter__()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 2:
                    self.counting.__exit__(None, None, None)
                    sent[name] = float(sum(self.counter.values()))
                turns.step_done(name)
                mpu = set_deepspeed_groups(trainer.engine.groups, trainer._ds_trainer.compiled)  # globals of DeepSpeed
                install_mpu(trainer.engine.deepspeed, mpu)

        args = TrainingArguments(
            f"{directory}/{name}",
            per_device_train_batch_size=GLOBAL_BATCH // dp,
            context_parallel_size=cp,
            sequence_parallel_size=sp,
            tensor_parallel_size=tp,
            max_steps=steps,
            zero_stage=stage,
            optim="adamw_torch_fused",
            logging_steps=steps,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            seed=SEED,
        )
        trainer = Trainer(build_model(), args, train_dataset=rows)
        trainer.callback_handler.add_callback(StepEnd())

        def train() -> None:
            trainer.train()
            losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

        return train

    with tempfile.TemporaryDirectory() as directory:
        loops = {name: loop(name, directory) for name in names}
        threads = [threading.Thread(target=turns.run, args=(name, loops[name])) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name, moments in turns.times:
        seconds[name] += [moment.wall for moment in moments]
    return {"seconds": {name: values[WARMUP:] for name, values in seconds.items()}, "sent": sent, "losses": losses}


def attention_times(rounds: int, length: int) -> dict[str, Any]:
    """Forward and backward pass of attention alone: the ring, the all-to-all, half and half."""
    from ds_trainer.engine.process_group import start_process_group
    from ds_trainer.parallel.attention import attention, use_sharding
    from ds_trainer.parallel.groups import parallel_groups
    from ds_trainer.parallel.layout import ParallelLayout
    from ds_trainer.parallel.sequence_plan import SequencePlan

    start_process_group("cpu")
    world = dist.get_world_size()
    ways = {"ring": (world, 1), "all-to-all": (1, world)}
    if world >= 4:
        ways["both"] = (world // 2, 2)
    cuts = {name: ParallelLayout(world, cp=cp, sp=sp) for name, (cp, sp) in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, float] = {}
    draw = random.Random(SEED)
    for index in range(WARMUP + rounds):
        for name in draw.sample(list(ways), len(ways)):
            groups = parallel_groups(cuts[name])
            shape = (1, HEADS, length // world, 32)
            query = torch.randn(shape, requires_grad=True)
            key = torch.randn((1, KEY_VALUE_HEADS, *shape[2:]), requires_grad=True)
            value = torch.randn((1, KEY_VALUE_HEADS, *shape[2:]), requires_grad=True)
            dist.barrier()
            start = time.perf_counter()
            with traffic() as counter, use_sharding(SequencePlan(cuts[name], length), groups):
                attention(query, key, value).sum().backward()
            dist.barrier()
            if index >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
            sent[name] = float(sum(counter.values()))
    return {"seconds": seconds, "sent": sent}


# -- the table -------------------------------------------------------------------------------------------------------


def ratios(result: dict[str, Any], base: str) -> list[dict[str, Any]]:
    """Median and quartiles of the ratio to ``base`` within a round, and the ratio of the bytes sent."""
    found = []
    for name, values in result["seconds"].items():
        pairs = [a / b for a, b in zip(values, result["seconds"][base], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        megabytes = result["sent"][name] / 1e6
        found.append({"name": name, "time": middle, "quartiles": [low, high], "megabytes": megabytes})
    return found


def table(title: str, base: str, rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [f"| {title} | time, relative to {base} | quartiles | MB sent by a rank |", "|---|---|---|---|"]
    for row in rows:
        low, high = row["quartiles"]
        lines.append(f"| {row['name']} | {row['time']:.2f} | {low:.2f} to {high:.2f} | {row['megabytes']:.2f} |")
    return "\n".join(lines)


def launch(part: str, options: argparse.Namespace, directory: str, **more: int) -> dict[str, Any]:
    """Run ``part`` in ``options.world`` new processes; what rank 0 measured."""
    out = Path(directory) / f"{part}.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={options.world}", f"--master-port={free_port()}"]
    words = [word for name, value in more.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *launcher, __file__, "--part", part, "--out", str(out), *words]
    subprocess.run(command, check=True, env=environment)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def main() -> int:
    """Parse the command line and run; the exit code is 1 where two layouts did not compute the same losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see it work, not to believe the numbers")
    parser.add_argument("--world", type=int, default=4, help="number of ranks")
    parser.add_argument("--zero", type=int, default=1, help="ZeRO stage of the layouts")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the sequence of attention alone")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    parser.add_argument("--part", choices=("layouts", "attention"), help=argparse.SUPPRESS)  # how it starts its ranks
    options = parser.parse_args()
    if options.part:
        layouts_asked = options.part == "layouts"
        measured = (
            step_times(options.rounds, options.zero)
            if layouts_asked
            else attention_times(options.rounds, options.length)
        )
        if os.environ["RANK"] == "0":
            options.out.write_text(json.dumps(measured), encoding="utf-8")
        return 0

    rounds = 3 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as directory:
        steps = launch("layouts", options, directory, rounds=rounds, zero=options.zero)
        alone = launch("attention", options, directory, rounds=rounds, length=options.length)
    base = name_of(layouts(options.world)[0])
    of_steps, of_attention = ratios(steps, base), ratios(alone, "ring")
    print(table(f"layout ({options.world} ranks, ZeRO {options.zero})", base, of_steps))
    print("\n" + table(f"attention ({options.length} tokens)", "ring", of_attention))
    wanted = steps["losses"][base]
    same = all(
        abs(a - b) <= 1e-4 * abs(b) for found in steps["losses"].values() for a, b in zip(found, wanted, strict=True)
    )
    print(f"\nlosses of all layouts agree: {same}")
    if options.out:
        packages = {name: version(name) for name in ("torch", "deepspeed", "transformers", "ds-trainer")}
        about = {"python": platform.python_version(), "cpu_cores": os.cpu_count(), **packages}
        report = {"environment": about, "layouts": of_steps, "attention": of_attention, "losses_agree": same}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

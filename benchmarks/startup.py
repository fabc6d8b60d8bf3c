"""Measures the start of a training: from the start of Python to the end of the first optimizer step.

Every start is a new process per rank. The same small model (a Llama, then a plain ``nn.Module``), data and DeepSpeed
settings are trained by this package's Trainer, by ``transformers.Trainer`` with DeepSpeed, and by a bare DeepSpeed
loop, which take turns in random order. On a busy machine only the smallest CPU time of a rank can be compared.
Importing torch, and transformers for the Llama, is the script's own part of the start; the time "after the model" is
what follows: importing the trainer, building the engine, one step.

DeepSpeed's shared-memory operator, which it compiles at the first start on CPUs (a minute or more), is turned off for
both: this package never uses it.

    python benchmarks/startup.py                 world 1 and 2, ZeRO 1 and 3
    python benchmarks/startup.py --rounds 2      does it run here?
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
import time
from pathlib import Path
from typing import Any

from ds_trainer.utils.ranks import free_port

OURS, THEIRS, BARE = "ds_trainer", "transformers", "bare"
"""``bare``: imports and ``deepspeed.initialize`` by hand, one step: the part of a start that no trainer can avoid."""

_BEGIN = """
import json, os, sys, time
import torch
torch.manual_seed(0)
"""
_LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=64, use_cache=False))
"""
_MODULE = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512)
    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
model = Model()
"""
MODELS = {"llama": _LLAMA, "module": _MODULE}
"""``module`` is a plain ``nn.Module``, which does not import transformers."""

_COMMON = """
row = torch.arange(64)
data = [{"input_ids": row, "labels": row} for _ in range(64)]
made = time.process_time()
stage = int(os.environ["STAGE"])

def first_step_done():
    wall = time.time() - float(os.environ["BEGAN"])
    cpu = time.process_time()
    print("MEASURED " + json.dumps({"wall": wall, "cpu": cpu, "trainer": cpu - made}), flush=True)

values = dict(output_dir=os.environ["OUT"], per_device_train_batch_size=4, max_steps=1, logging_steps=10**9,
    save_strategy="no", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, learning_rate=1e-3)
"""
_TRAIN = """
class StepEnd(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        first_step_done()

Trainer(model, args, train_dataset=data, callbacks=[StepEnd()]).train()
"""
_NO_OPERATOR = """
import deepspeed.ops
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""
_JSON = """
config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
"""
SCRIPTS = {
    OURS: _COMMON
    + "from ds_trainer import Trainer, TrainerCallback, TrainingArguments\n"
    + "args = TrainingArguments(**values, zero_stage=stage)\n"
    + _TRAIN,
    THEIRS: _COMMON
    + _NO_OPERATOR
    + _JSON
    + "from transformers import Trainer, TrainerCallback, TrainingArguments\n"
    + "args = TrainingArguments(**values, report_to='none', deepspeed=config)\n"
    + _TRAIN,
    BARE: _COMMON
    + _NO_OPERATOR
    + _JSON
    + """
import deepspeed
deepspeed.init_distributed("gloo")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
batch = {key: torch.stack([row] * 4) for key in ("input_ids", "labels")}
outputs = engine(**batch)
engine.backward(outputs["loss"])
engine.step()
first_step_done()
""",
}


def start(name: str, model: str, world: int, stage: int, folder: Path) -> dict[str, float]:
    """Start one training: the wall-clock seconds of the slowest rank, and the mean CPU seconds of a rank.

    Raises:
        CalledProcessError: it failed.
    """
    script = folder / f"with_{name}.py"
    script.write_text(_BEGIN + MODELS[model] + SCRIPTS[name], encoding="utf-8")
    root = str(Path(__file__).resolve().parents[1])
    common = os.environ | {
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "STAGE": str(stage),
        "BEGAN": str(time.time()),
    }
    with tempfile.TemporaryDirectory(dir=folder) as out:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                cwd=folder,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OUT": out},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        found = []
        for process in ranks:
            output, errors = process.communicate()
            if process.returncode:
                print(errors, file=sys.stderr)
                raise subprocess.CalledProcessError(process.returncode, process.args, output, errors)
            line = next(line for line in output.splitlines() if line.startswith("MEASURED "))
            found.append(json.loads(line.removeprefix("MEASURED ")))
    return {
        "wall": max(one["wall"] for one in found),
        "cpu": statistics.mean(one["cpu"] for one in found),
        "trainer": statistics.mean(one["trainer"] for one in found),
    }


def measure(model: str, world: int, stage: int, rounds: int, names: list[str]) -> dict[str, Any]:
    """One row of the table."""
    draw = random.Random(0)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:  # bytecode and files are cached
            start(name, model, world, stage, Path(folder))
        for _ in range(rounds):
            for name in draw.sample(names, len(names)):
                times[name].append(start(name, model, world, stage, Path(folder)))
    return {"model": model, "world": world, "stage": stage, "rounds": rounds, "times": times}


def table(rows: list[dict[str, Any]]) -> str:
    """The smallest CPU times of each, the median wall-clock time, and each relative to transformers', in Markdown."""
    lines = [
        "| model | ranks | ZeRO | start | CPU s | relative | after the model, CPU s | relative | wall s | relative |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name, times in row["times"].items():
            cells = [row["model"], str(row["world"]), str(row["stage"]), name]
            other = row["times"].get(THEIRS, times)
            for clock, typical in (("cpu", min), ("trainer", min), ("wall", statistics.median)):
                own, theirs = typical(one[clock] for one in times), typical(one[clock] for one in other)
                cells += [f"{own:.2f}", f"{own / theirs:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--world", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--zero", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for world in options.world:
            for stage in options.zero:
                rows.append(measure(model, world, stage, options.rounds, options.only))
                print(table(rows[-1:]), flush=True)
    print("\n" + table(rows))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

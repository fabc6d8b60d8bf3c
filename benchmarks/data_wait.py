"""Measures what the data costs a training: time to the first batch, memory, wait per step, and a start in the middle.

A dataset of up to 10^8 samples computes each sample from its position, so only the order of the samples and the
collation cost anything. Every case is a new process: the loader of a Trainer is built and read (CPU time, memory), from
the beginning and from the middle of the epoch, then a small Llama is trained and the fraction of the time in which the
loop waited for data is read from the log (``data_wait``). The loader of ``transformers.Trainer`` is read too. Its
shuffled order is a Python list with one number per sample, about 36 bytes each, so the largest size is left out unless
``--theirs-up-to`` says otherwise.

    python benchmarks/data_wait.py                   10^4, 10^6 and 10^8 samples
    python benchmarks/data_wait.py --samples 10000   does it run here?
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

OURS, GROUPED, THEIRS = "ds_trainer", "ds_trainer, group_by_length", "transformers"
LENGTH, MICRO_BATCH, VOCABULARY = 128, 8, 4096
BATCHES = 200


class Computed(Dataset[dict[str, Any]]):
    """Samples that follow from their position. With ``ragged``, of 16 to 128 tokens, and the lengths are known.

    Args:
        samples: length of the dataset.
        ragged: whether samples differ in length.
    """

    def __init__(self, samples: int, ragged: bool) -> None:
        self.samples = samples
        self._tokens = torch.randint(VOCABULARY, (2 * LENGTH,), generator=torch.Generator().manual_seed(0))
        if ragged:
            self.lengths = np.random.default_rng(0).integers(16, LENGTH + 1, samples, np.int32)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = int(self.lengths[index]) if hasattr(self, "lengths") else LENGTH
        tokens = self._tokens[index % LENGTH :][:length]
        return {"input_ids": tokens, "labels": tokens}


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row."""
    if len({len(row["input_ids"]) for row in rows}) == 1:
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    fill = {"input_ids": 0, "labels": -100}
    return {
        key: torch.nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=fill[key])
        for key in rows[0]
    }


def peak_mb() -> float:
    """Largest resident memory of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, samples: int, steps: int) -> dict[str, Any]:
    """One case, in this process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )
    data = Computed(samples, ragged=name == GROUPED)
    waits: list[float] = []
    with tempfile.TemporaryDirectory() as out:
        values: dict[str, Any] = dict(
            output_dir=out,
            per_device_train_batch_size=MICRO_BATCH,
            max_steps=steps,
            logging_steps=max(1, steps // 3),
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            report_to="none",
        )
        trainer = _trainer(name, values, model, data)
        before, began = peak_mb(), time.process_time()
        loader = trainer.get_train_dataloader()
        batches = iter(loader)
        next(batches)
        first = time.process_time() - began
        memory = peak_mb() - before
        costs = []
        for _ in range(BATCHES):
            began = time.process_time()
            next(batches)
            costs.append(time.process_time() - began)
        del batches
        middle = None
        if name != THEIRS:  # transformers skips batch by batch
            began = time.process_time()
            loader.start(0, first_sample=samples // 2)
            list(islice(iter(loader), 1))
            middle = time.process_time() - began
            loader.start(0)
            waits = _waits(trainer)
    return {
        "loop": name,
        "samples": samples,
        "first_batch_cpu_s": first,
        "added_memory_mb": memory,
        "batch_cpu_ms": 1000 * statistics.median(costs),
        "start_in_the_middle_cpu_s": middle,
        "data_wait": statistics.median(waits) if waits else None,
    }


def _trainer(name: str, values: dict[str, Any], model: torch.nn.Module, data: Any) -> Any:
    if name == THEIRS:
        from transformers import Trainer, TrainingArguments

        return Trainer(model, TrainingArguments(**values), data_collator=pad, train_dataset=data)
    import ds_trainer

    if name == GROUPED:
        values["train_sampling_strategy"] = "group_by_length"
    return ds_trainer.Trainer(model, ds_trainer.TrainingArguments(**values), data_collator=pad, train_dataset=data)


def _waits(trainer: Any) -> list[float]:
    """Train; the fraction of the time spent waiting for data in each logged window but the first."""
    trainer.train()
    return [entry["data_wait"] for entry in trainer.state.log_history if "data_wait" in entry][1:]


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| loop | samples | to the first batch, CPU s | memory added, MB | a batch, CPU ms | from the middle, CPU s "
        "| data wait |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        middle, wait = row["start_in_the_middle_cpu_s"], row["data_wait"]
        lines.append(
            f"| {row['loop']} | {row['samples']:.0e} | {row['first_batch_cpu_s']:.3f} | {row['added_memory_mb']:,.0f} "
            f"| {row['batch_cpu_ms']:.2f} | {'' if middle is None else f'{middle:.3f}'} "
            f"| {'' if wait is None else f'{100 * wait:.2f} %'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every case in a new process, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", nargs="+", type=int, default=[10**4, 10**6, 10**8])
    parser.add_argument("--theirs-up-to", type=int, default=10**6, help="largest size for transformers")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of the training")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # how it starts itself
    options = parser.parse_args()
    if options.case:
        name, samples = json.loads(options.case)
        result = measure(name, samples, options.steps)
        options.out.write_text(json.dumps(result), encoding="utf-8")
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "case.json"
        for samples in options.samples:
            for name in (OURS, GROUPED, THEIRS):
                if name == THEIRS and samples > options.theirs_up_to:
                    continue
                case = ["--case", json.dumps([name, samples]), "--steps", str(options.steps), "--out", str(part)]
                environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
                subprocess.run(
                    [sys.executable, __file__, *case], check=True, env=environment, stdout=subprocess.DEVNULL
                )
                rows.append(json.loads(part.read_text(encoding="utf-8")))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(rows))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Measures the memory of a rank until its first step, and the bytes that all ranks read.

A Llama with random weights is written as sharded safetensors. The ranks of one node, each a process, load it in one of
these ways, build the engine, and train one step on the CPU:

* *transformers, loaded model*: ``AutoModelForCausalLM.from_pretrained(DIR)``, then ``Trainer(model)``;
* *ds_trainer, loaded model*: ``ds_trainer.from_pretrained(DIR)``, then ``Trainer(model)``;
* *path*: ``Trainer(model=DIR)``;
* *copied*: the first with a copy of the model, which is not memory-mapped: the control. Not in the default.

Definitions, for one rank:

* *private*: anonymous and shared memory of the process (:mod:`memory_watch`), minus that before the load. A tiny model
  is trained first, so imports and other work that a process does once are not counted. *gap*: the longest time between
  two samples.
* *peak*: the largest private memory from the start of the load until the first step begins.
* *load*: the same until DeepSpeed is about to move the model to the device: shards, and the memory to create them.
* *holds*: the private memory when the first step begins: shards, master weights, gradient buffers.
* *read*: bytes that our readers on all ranks requested, divided by the size of the weight files; 0 if transformers maps
  the files; *disk*: bytes from the disk for all ranks (``read_bytes``; the page cache is empty before).
* *whole*: parameters that are whole when DeepSpeed is about to move the model to the device.

    python benchmarks/loading_memory.py --out benchmarks/results/loading_memory.json    some minutes, 12 GB of memory
    python benchmarks/loading_memory.py --quick                                         a model of 63 MB
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from memory_watch import MB, Look, asked_for, look, watched
from weight_files import Tokens, bytes_of, seen_when_configured, write_random

THEIRS, OURS, PATH, COPIED = "transformers, loaded model", "ds_trainer, loaded model", "path", "copied"
WAYS = (THEIRS, OURS, PATH, COPIED)


@dataclass(frozen=True)
class Model:
    """A Llama, in bfloat16."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    file_bytes: int

    def config(self) -> Any:
        """As transformers has it."""
        from transformers import LlamaConfig

        sizes: dict[str, Any] = dict(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            vocab_size=self.vocabulary,
            num_attention_heads=16,
            num_key_value_heads=16,
        )
        return LlamaConfig(**sizes, max_position_embeddings=64, use_cache=False)


LARGE = Model("1 GB", 2048, 6144, 9, 4096, 200 * 10**6)
TINY = Model("tiny", 64, 64, 1, 64, 10**6)
SMALL = Model("63 MB", 512, 1536, 9, 1024, 15 * 10**6)


class Case(NamedTuple):
    """One load."""

    way: str
    ranks: int
    zero: int
    optim: str = "adamw_torch"


def load_and_step(ready: Callable[[], None], case: Case, directory: Path, output: Path) -> dict[str, Any]:
    """What one rank does: moments, and what was counted until the first step."""
    import torch
    import transformers

    import ds_trainer
    from ds_trainer.engine.process_group import start_process_group

    torch.set_num_threads(1)
    start_process_group("cpu")
    args = ds_trainer.TrainingArguments(
        str(output),
        max_steps=1,
        per_device_train_batch_size=1,
        zero_stage=case.zero,
        bf16=True,
        optim=case.optim,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data: Any = Tokens(case.ranks, transformers.AutoConfig.from_pretrained(directory).vocab_size)
    tiny = transformers.AutoModelForCausalLM.from_config(TINY.config(), dtype=torch.bfloat16)
    before_all = ds_trainer.Trainer(tiny, args, train_dataset=Tokens(case.ranks, TINY.vocabulary))
    before_all.train()
    before_all.engine.close()
    del tiny, before_all
    found: dict[str, Any] = {"seen": {}}
    ready()

    class FirstStep(ds_trainer.TrainerCallback):
        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            found["asked"] = {name: value - before[name] for name, value in asked_for().items()}
            found["first step"] = look()

    before = asked_for()
    found["start"] = look()
    model: Any = str(directory)
    if case.way in (THEIRS, COPIED):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        model = copy.deepcopy(model) if case.way == COPIED else model
    elif case.way == OURS:
        model = ds_trainer.from_pretrained(directory)
    with seen_when_configured(found["seen"]):
        trainer = ds_trainer.Trainer(model, args, train_dataset=data, callbacks=[FirstStep()])
        found["loss"] = trainer.train().training_loss
    report = trainer._ds_trainer.engines.load_report
    found["read"] = 0 if report is None else report.bytes_read  # of all ranks
    found["end"] = look()
    return found


def measure(case: Case, directory: Path, seconds: float = 900) -> dict[str, Any]:
    """Load the model of ``directory`` on ``case.ranks`` ranks: figures of the ranks that have the highest.

    Raises:
        RuntimeError: a rank failed.
    """
    from ds_trainer.utils.ranks import free_port

    common = {"WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common.update(
        LOCAL_WORLD_SIZE=str(case.ranks), DS_TRAINER_SELF_TEST="never"
    )  # which would train a model of its own
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(case.ranks)]
    _out_of_page_cache(directory)
    with tempfile.TemporaryDirectory() as output:
        ranks, looks = watched(load_and_step, (case, directory, Path(output)), environments, seconds)
    return {**case._asdict(), **_figures(ranks, looks, bytes_of(directory))}


def _out_of_page_cache(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _figures(ranks: list[dict[str, Any]], looks: list[list[Look]], file_bytes: int) -> dict[str, Any]:
    figures = []
    for rank, seen in zip(ranks, looks, strict=True):
        start, first, end = rank["start"], rank["first step"], rank["end"]
        until = [start, *(one for one in seen if start.when <= one.when <= first.when), first]
        step = [first, *(one for one in seen if first.when <= one.when <= end.when), end]
        configured = rank["seen"].pop("configured")
        figures.append(
            {
                "load_peak": max(one.private for one in until if one.when <= configured) - start.private,
                "peak": max(one.private for one in until) - start.private,
                "peak_after": max(until, key=lambda one: one.private).when - start.when,
                "holds": first.private - start.private,
                "step_peak": max(one.private for one in step) - start.private,
                "disk": rank["asked"]["read_bytes"],
                "gap": max(b.when - a.when for a, b in pairwise(until)),
                "seconds": first.when - start.when,
                **rank["seen"],
            }
        )
    highest = {name: max(one[name] for one in figures) for name in figures[0]}
    return {
        **highest,
        "file_bytes": file_bytes,
        "peak_over_holds": max(one["peak"] / one["holds"] for one in figures),
        "all_peaks": sum(one["peak"] for one in figures),
        "read": ranks[0]["read"] / file_bytes,
        "disk": sum(one["disk"] for one in figures) / file_bytes,
        "loss": ranks[0]["loss"],
    }


def table(results: list[dict[str, Any]]) -> str:
    """One line a case; memory in MB."""
    lines = [
        "| way | ranks | ZeRO | load | peak | holds | peak / holds | all peaks | read | disk | whole | seconds | gap |",
        "|---|" + "---:|" * 12,
    ]
    for one in results:
        memory = " | ".join(f"{one[name] / MB:,.0f}" for name in ("load_peak", "peak", "holds"))
        memory += f" | {one['peak_over_holds']:.2f}"
        read = f"{one['read']:.2f} | {one['disk']:.2f} | {one['whole']} of {one['parameters']}"
        times = f"{one['seconds']:.1f} | {1000 * one['gap']:.0f} ms"
        head = f"{one['way']} | {one['ranks']} | {one['zero']}"
        lines.append(f"| {head} | {memory} | {one['all_peaks'] / MB:,.0f} | {read} | {times} |")
    return "\n".join(lines)


def main() -> None:
    from kept_results import Results

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:3])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--zero", type=int, nargs="+", default=[3])
    parser.add_argument("--optim", default="sgd")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    model = SMALL if asked.quick else LARGE
    kept = Results(asked.out, "cpu", model=model.name)
    with tempfile.TemporaryDirectory() as folder:
        write_random(model.config(), Path(folder), model.file_bytes)
        for zero in asked.zero:
            for way in asked.ways:
                for ranks in asked.ranks:
                    kept.add(measure(Case(way, ranks, zero, asked.optim), Path(folder)))
                    print(table(kept.cases[-1:]), flush=True)
    print(table(kept.cases))


if __name__ == "__main__":
    main()

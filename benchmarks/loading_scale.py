"""Counts the work of one rank of many that loads Llama 3 70B, Llama 3.1 405B or a Qwen3 mixture, without weights.

The weight files have the real headers in the official layout (30 and 191 files) and no data (:mod:`weight_files`). One
rank of a fake process group (:mod:`fake_world`) runs a training with the real ``Trainer`` until its first step: the
model on meta, the headers, tensor-parallel slices, shards of ZeRO-3, their elements from the files. All weights except
the last norm are frozen, so memory contains no master weights and gradients, which do not depend on loading.

    python benchmarks/loading_scale.py --out benchmarks/results/loading_scale.json    some minutes, 4 GB of memory
    python benchmarks/loading_scale.py --models 70B --ranks 64                        does it run here?

* *opened*: model files that the rank opens; *reads*, *asked for*: read system calls, and their bytes.
* *CPU*: processor time for everything, including copies of the data. The files have no data on a disk.
* *private*, *holds*: peak host memory until the first step, and host memory at the first step (:mod:`memory_watch`);
  *beyond*: the difference, which includes buffers.
* *whole*: parameters that are whole when DeepSpeed is about to move the model to the device.

A fake group shows the work of this rank. It does not show the speed of 512 ranks with one file system.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from memory_watch import MB, asked_for, look, watched
from weight_files import Tokens, bytes_of, seen_when_configured, write_headers

MODELS: dict[str, dict[str, Any]] = {
    "70B": dict(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    ),
    "405B": dict(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "small": dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=1024,
        max_position_embeddings=64,
    ),
}
# Qwen3-30B-A3B and Qwen3-235B-A22B, with a file entry for each matrix of an expert, as on the Hub.
_QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
_30B = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32}
_235B = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64}
MODELS |= {"30B-A3B": _30B | _QWEN, "235B-A22B": _235B | _QWEN}
TINY = {**MODELS["small"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
TINY_EXPERTS = {**TINY, "moe_intermediate_size": 16, **_QWEN, "vocab_size": 64}
_SAME: dict[str, Any] = {"tie_word_embeddings": False, "use_cache": False}
FILE_BYTES = {"small": 2 * 10**6}
RANKS = {"70B": 64, "405B": 512, "small": 64, "30B-A3B": 8, "235B-A22B": 64}


LAST_NORM = "model.norm.weight"


class Line(NamedTuple):
    """One line of the table."""

    model: str
    ranks: int
    tp: int
    rank: int
    ep: int = 1


def load(
    ready: Callable[[], None], line: Line, directory: Path, tiny: Path, output: Path, broadcasts: list[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    """Run the rank until its first step. Returns its counts, and the broadcasts of rank 0."""
    import torch
    from fake_world import Counts, difference, fake_world, watch_files

    import ds_trainer
    from ds_trainer.engine.loading.weight_source import attached_weight_source
    from ds_trainer.training.train_loop import TrainLoop

    def no_step(loop: TrainLoop) -> None:
        loop._events.control.should_training_stop = True

    args = ds_trainer.TrainingArguments(
        str(output),
        max_steps=1,
        per_device_train_batch_size=1,
        zero_stage=3,
        tensor_parallel_size=line.tp,
        expert_parallel_size=line.ep,
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    def until_the_first_step(files: Path) -> tuple[Any, float]:
        model = ds_trainer.from_pretrained(files)
        source: Any = attached_weight_source(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == LAST_NORM)
        data: Any = Tokens(line.ranks, TINY["vocab_size"])
        trainer = ds_trainer.Trainer(model, args, train_dataset=data)
        trainer.train()
        return trainer.engine, sum(one.seconds for one in _file_weights(source))

    torch.set_num_threads(1)
    TrainLoop._run_epoch = no_step  # type: ignore[method-assign]  # this process does nothing else
    counts = Counts()
    counts.broadcasts = broadcasts
    watch_files(counts)
    with fake_world(line.ranks, counts, line.rank):
        engine, _ = until_the_first_step(tiny)  # excludes imports and other work that a process does once
        engine.close()
        ready()
        counts.files_below = directory
        seen: dict[str, Any] = {}
        asked, start, done, cpu = asked_for(), look(), counts.now(), time.process_time()
        with seen_when_configured(seen):
            engine, reading = until_the_first_step(directory)
        cpu = time.process_time() - cpu
        found = difference(asked, asked_for()), difference(done, counts.now())
        figures = {
            "start": start,
            "first step": look(),
            "reads": found[0]["syscr"],
            "asked": found[0]["rchar"],
            "opened": found[1]["files_opened"],
            "collectives": found[1].get("collectives", 0),
            "objects": found[1].get("objects", 0),
            "seconds": found[1]["seconds"],
            "reading": reading,
            "cpu": cpu,
            "shards": sum(p.ds_tensor.numel() * p.element_size() for p in engine.deepspeed.module.parameters()),
            **seen,
        }
        return figures, counts.broadcasts


def _file_weights(source: Any) -> list[Any]:
    """The readers of files of a weight source."""
    if hasattr(source, "sources"):
        return [found for one in source.sources for found in _file_weights(one)]
    return [source] if hasattr(source, "bytes_read") else []


def measure(line: Line, directory: Path, tiny: Path, broadcasts: list[bytes]) -> dict[str, Any]:
    """Measure one line of the table.

    Args:
        line: the line.
        directory: the weight files.
        tiny: the weight files of a tiny model.
        broadcasts: the broadcasts of rank 0; filled if ``line`` is of rank 0.

    Raises:
        RuntimeError: the rank failed.
    """
    with tempfile.TemporaryDirectory() as output:
        environment = {"DS_TRAINER_SELF_TEST": "never", "DS_ACCELERATOR": "cpu"}
        sent = [] if line.rank == 0 else broadcasts
        ((found, sent),), (looks,) = watched(load, (line, directory, tiny, Path(output), sent), [environment])
    if line.rank == 0:
        broadcasts[:] = sent
    start, first = found.pop("start"), found.pop("first step")
    during = [one.private for one in looks if start.when <= one.when <= first.when]
    return {
        **line._asdict(),
        **found,
        "holds": first.private - start.private,
        "private": max(*during, first.private) - start.private,
        "files": len(list(directory.glob("*.safetensors"))),
        "file_bytes": bytes_of(directory),
    }


def table(results: list[dict[str, Any]]) -> str:
    """One line a result."""
    columns = "model, ranks, layout, rank, opened, reads, asked for, shards, private, holds, beyond, CPU, whole"
    lines = [f"| {columns.replace(', ', ' | ')} |", "|---|---:|---|" + "---:|" * 10]
    for one in results:
        layout = f"tp {one['tp']} x ZeRO-3 over {one['ranks'] // one['tp']}" if one["tp"] > 1 else "ZeRO-3"
        layout += f", experts over {one['ep']}" if one["ep"] > 1 else ""
        counts = f"{one['opened']:,.0f} | {one['reads']:,}"
        sizes = " | ".join(f"{one[name] / MB:,.0f} MB" for name in ("asked", "shards", "private", "holds"))
        beyond = f"{(one['private'] - one['holds']) / MB:,.0f} MB"
        head = f"{one['model']} | {one['ranks']} | {layout} | {one['rank']} | {counts} | {sizes} | {beyond}"
        lines.append(f"| {head} | {one['cpu']:.1f} s | {one['whole']} of {one['parameters']} |")
    return "\n".join(lines)


def write(model: str, directory: Path) -> Path:
    """Write the weight files of a model, without data. Returns their directory."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes = {"tiny": TINY, "tiny experts": TINY_EXPERTS}.get(model) or MODELS[model]
    config = (Qwen3MoeConfig if "num_experts" in sizes else LlamaConfig)(**sizes, **_SAME)
    write_headers(config, directory / model, FILE_BYTES.get(model, 5 * 10**9))
    return directory / model


def main() -> None:
    from kept_results import Results

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["70B", "405B"])
    parser.add_argument("--ranks", type=int, help="default: 64 for 70B, 512 for 405B")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ep", type=int, nargs="+", default=[1], help="ranks that divide the experts")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    kept = Results(asked.out, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.models:
            files = write(model, Path(folder))
            tiny = write("tiny experts" if "num_experts" in MODELS[model] else "tiny", Path(folder))
            ranks = asked.ranks or RANKS[model]
            for tp, ep in itertools.product(asked.tp, asked.ep):
                broadcasts: list[bytes] = []
                for rank in (0, min(ranks // 2 + tp // 2, ranks - 1)):
                    kept.add(measure(Line(model, ranks, tp, rank, ep), files, tiny, broadcasts))
                    print(table(kept.cases[-1:]), flush=True)
    print(table(kept.cases))


if __name__ == "__main__":
    main()

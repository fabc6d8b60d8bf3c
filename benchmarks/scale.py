"""Counts the work of one rank that grows with the number of ranks: rank 0 of up to 4,096, in one process.

Rank 0 starts a training with the real ``Trainer``, trains some steps, writes a checkpoint (in the background, which is
the default), and resumes from it in another training. The process group is a fake one (:mod:`fake_world`). The
benchmark counts process groups, store operations, objects and bytes between ranks, files and descriptors.

    python benchmarks/scale.py --out benchmarks/results/scale.json      some minutes on one core
    python benchmarks/scale.py --ranks 8 64 --zero 1                    does it run here?

A fake process group shows the work of this process: calls, bytes, files, seconds. It does not show the work of others
(connections of NCCL and gloo, 4,096 ranks that use one store or file system), and its losses are meaningless, because
gradients are not summed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

RANKS = (8, 64, 1024, 4096)
LAYOUTS = {"dp": (1, 1, 1), "tp 8": (8, 1, 1), "tp 8 x cp 2 x sp 2": (8, 2, 2)}
"""tp, cp, sp."""
STEPS, SAVED_AFTER = 6, 5
PHASES = ("start", "step", "save", "resume")
SHOWN = (
    *("groups", "groups_of_others", "store_operations", "store_keys", "store_bytes", "object_gathers", "objects"),
    *("object_bytes", "collectives", "messages", "files_opened", "sockets", "descriptors", "seconds"),
)


class Line(NamedTuple):
    """One line of the table."""

    ranks: int
    layout: str
    zero: int

    @property
    def possible(self) -> bool:
        """Whether the layout divides the ranks."""
        tp, cp, sp = LAYOUTS[self.layout]
        return self.ranks % (tp * cp * sp) == 0


def measure(line: Line, folder: Path, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """All phases of a line, in this process, which should do nothing else: counts by phase."""
    from fake_world import Counts, difference, fake_world, watch_files

    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401  # what is imported first is not counted

    small_model()
    counts = Counts()
    watch_files(counts)
    os.environ["DS_TRAINER_SELF_TEST"] = "never"  # it needs real sums of gradients; its cost is measured separately
    with fake_world(line.ranks, counts):
        result = _phases(line, folder, counts, difference, extra or {})
    return {**line._asdict(), **result}


def _phases(line: Line, folder: Path, counts: Any, difference: Any, extra: dict[str, Any]) -> dict[str, Any]:
    from ds_trainer import Trainer, TrainingArguments
    from ds_trainer.engine.training_engine import TrainingEngine
    from ds_trainer.training.model.sequence_sharding import setup
    from ds_trainer.utils.errors import ConfigError

    tp, cp, sp = LAYOUTS[line.layout]
    output = folder / "run"
    counts.files_below = output
    moments: list[dict[str, float]] = []
    take_step = TrainingEngine.step

    def step(engine: Any, *args: Any, **named: Any) -> bool:
        taken = take_step(engine, *args, **named)
        moments.append(counts.now())
        return taken

    def trainer() -> Any:
        values: dict[str, Any] = dict(
            max_steps=STEPS,
            per_device_train_batch_size=1,
            zero_stage=line.zero,
            tensor_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel_size=sp,
            save_strategy="steps",
            save_steps=SAVED_AFTER,
            logging_steps=1,
            straggler_steps=1,
            disable_tqdm=True,
            use_cpu=True,
            report_to="none",
        )
        args = TrainingArguments(str(output), **{**values, **extra})
        return Trainer(small_model(), args, train_dataset=Blocks(line.ranks * (STEPS + 1)))

    def check_sequence_sharding(*args: Any) -> None:
        with suppress(ConfigError):  # sharded sequences are compared with whole ones: here the other shards are wrong
            check(*args)

    check, setup.check_sequence_sharding = setup.check_sequence_sharding, check_sequence_sharding
    TrainingEngine.step = step  # type: ignore[method-assign]
    others = OthersFiles(line.ranks, counts)
    try:
        with others:
            before = counts.now()
            first = trainer()
            first.train()
            result: dict[str, Any] = {
                "start": difference(before, moments[1]),  # with the first two steps, after which saves are prepared
                "step": difference(moments[2], moments[3]),
                "save": difference(moments[SAVED_AFTER - 1], counts.now()),  # with the last step
            }
            written = output / f"checkpoint-{SAVED_AFTER}"
            result["manifest_bytes"] = (written / "manifest.json").stat().st_size
            first.engine.close()
            moments.clear()
            before = counts.now()
            second = trainer()
            second.train(resume_from_checkpoint=str(written))
            result["resume"] = difference(before, moments[0])
            result["peak_mb"] = counts.now()["peak_mb"]
            second.engine.close()
    finally:
        TrainingEngine.step = take_step  # type: ignore[method-assign]
        setup.check_sequence_sharding = check
    return result


class OthersFiles:
    """While it is entered, files of the other ranks appear in a checkpoint when this one has written its own."""

    def __init__(self, ranks: int, counts: Any) -> None:
        self._ranks, self._counts = ranks, counts

    def __enter__(self) -> None:
        from fake_world import name_of_rank

        from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave

        self._write = write = CheckpointSave._write
        ranks, counts = self._ranks, self._counts

        def with_others(save: Any, partial: Path, contents: Any) -> Any:
            records, parts = write(save, partial, contents)
            with counts.aside():
                for record in records:
                    for rank in range(1, ranks):
                        name = name_of_rank(record.name, rank)
                        if name != record.name:
                            os.link(partial / record.name, partial / name)
            return records, parts

        CheckpointSave._write = with_others  # type: ignore[method-assign]

    def __exit__(self, *error: Any) -> None:
        from ds_trainer.checkpoint.protocol.checkpoint_save import CheckpointSave

        CheckpointSave._write = self._write  # type: ignore[method-assign]


def small_model() -> Any:
    """A small Llama whose weights can be partitioned over eight ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64, use_cache=False))


class Blocks:
    """Samples of 16 tokens, made when they are asked for."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        tokens = (torch.arange(16) * 7 + index) % 64
        return {"input_ids": tokens, "labels": tokens.clone()}


def in_a_process(line: Line) -> dict[str, Any]:
    """:func:`measure` in a separate process, because the process group cannot be replaced."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--line", json.dumps(line), "--folder", folder]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{line}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))


def table(results: list[dict[str, Any]]) -> str:
    """A table for each layout and stage: rows are counts of a phase, columns numbers of ranks."""
    lines = []
    for layout, zero in dict.fromkeys((one["layout"], one["zero"]) for one in results):
        chosen = [one for one in results if (one["layout"], one["zero"]) == (layout, zero)]
        lines.append(f"\n### {layout}, ZeRO {zero}\n")
        lines.append("| phase | what | " + " | ".join(f"{one['ranks']:,} ranks" for one in chosen) + " | grows |")
        lines.append("|---|---|" + "---:|" * len(chosen) + "---|")
        for phase in PHASES:
            for name in SHOWN:
                values = [one[phase].get(name, 0) for one in chosen]
                if any(values):
                    shown = [f"{value:.2f}" if name == "seconds" else f"{value:,.0f}" for value in values]
                    lines.append(f"| {phase} | {name} | {' | '.join(shown)} | {growth(chosen, values)} |")
        sizes = [one["manifest_bytes"] for one in chosen]
        lines.append(f"| save | manifest_bytes | {' | '.join(f'{s:,}' for s in sizes)} | {growth(chosen, sizes)} |")
    return "\n".join(lines)


def growth(chosen: list[dict[str, Any]], values: list[float]) -> str:
    """How a count grows between the smallest and the largest number of ranks."""
    ranks = chosen[-1]["ranks"] / chosen[0]["ranks"]
    if ranks == 1 or values[-1] <= 1.5 * max(values[0], 1e-9):
        return "no"
    slope = (values[-1] - values[-2]) / (chosen[-1]["ranks"] - chosen[-2]["ranks"])
    return f"{slope:,.3g} a rank"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--zero", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.line:
        print(json.dumps(measure(Line(*json.loads(asked.line)), asked.folder)))
        return
    lines = [Line(ranks, layout, zero) for layout in asked.layouts for zero in asked.zero for ranks in asked.ranks]
    results = [in_a_process(line) for line in lines if line.possible]
    print(table(results))
    if asked.out:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Generation under ZeRO-3: weights gathered layer by layer for every token, or once for the whole evaluation.

Both methods run in the same processes with the same Trainer, model and batches, and take turns in random order. So the
*ratio within a round* is meaningful on a busy machine, where single times are not. The tokens must be equal.

    python benchmarks/generation.py                  2 ranks on the CPU
    python benchmarks/generation.py --quick          a smaller model, few rounds
    python benchmarks/generation.py --world 1        the cost of the hooks alone
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
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ds_trainer.utils.ranks import free_port

SEED, BATCH, SOURCE = 42, 4, 32
WAYS = ("never", "always")


def build_model(width: int, layers: int) -> torch.nn.Module:
    """A T5 with random weights that never generates an end token."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(SEED)
    config = T5Config(
        vocab_size=512,
        d_model=width,
        d_kv=32,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=width // 32,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return T5ForConditionalGeneration(config)


def times(width: int, layers: int, tokens: int, rounds: int, beams: int) -> dict[str, Any]:
    """Seconds of each evaluation, by way and round, on this rank; and whether all gave the same tokens."""
    from ds_trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from ds_trainer.utils import distributed

    with tempfile.TemporaryDirectory() as directory:
        args = Seq2SeqTrainingArguments(
            directory,
            zero_stage=3,
            predict_with_generate=True,
            per_device_eval_batch_size=BATCH,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        model = build_model(width, layers)
        parameters = sum(p.numel() for p in model.parameters())
        trainer = Seq2SeqTrainer(model, args)
        generator = torch.Generator().manual_seed(SEED)
        rows = [
            {"input_ids": row, "attention_mask": torch.ones_like(row)}
            for row in torch.randint(2, 512, (2 * BATCH * args.world_size, SOURCE), generator=generator)
        ]
        draw = random.Random(SEED)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        results = []
        for index in range(rounds + 1):  # the first round warms up
            for way in draw.sample(WAYS, len(WAYS)):
                args.generation_gather = way
                distributed.barrier()
                start = time.perf_counter()
                output = trainer.predict(rows, max_new_tokens=tokens, min_new_tokens=tokens, num_beams=beams)
                distributed.barrier()
                if index:
                    seconds[way].append(time.perf_counter() - start)
                results.append(output.predictions)
        same = all((result == results[0]).all() for result in results)
    return {"seconds": seconds, "same": bool(same), "parameters": parameters}


def row_of(name: str, found: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Milliseconds a token of two batches, and the ratio within rounds: median and quartiles."""
    layered, once = (found["seconds"][way] for way in WAYS)
    ratios = [a / b for a, b in zip(layered, once, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "name": name,
        "parameters": found["parameters"],
        "layer_by_layer_ms": 1e3 * statistics.median(layered) / (2 * tokens),
        "gathered_ms": 1e3 * statistics.median(once) / (2 * tokens),
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
        "same_tokens": found["same"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| model | parameters | layer by layer, ms/token | gathered once, ms/token | ratio | quartiles | same tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quartiles"]
        lines.append(
            f"| {row['name']} | {row['parameters']:,} | {row['layer_by_layer_ms']:.1f} | {row['gathered_ms']:.1f} | "
            f"{row['ratio']:.1f} | {low:.1f} to {high:.1f} | {'yes' if row['same_tokens'] else 'NO'} |"
        )
    return "\n".join(lines)


def rank_main(options: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes the report."""
    cases = [("small", 64, 2, 1), ("small, 4 beams", 64, 2, 4)]
    if not options.quick:
        cases += [("larger", 256, 4, 1)]
    tokens, rounds = (8, 3) if options.quick else (24, 7)
    rows = [row_of(name, times(w, n, tokens, rounds, beams), tokens) for name, w, n, beams in cases]
    if os.environ["RANK"] == "0":
        report = {
            "world": options.world,
            "torch": version("torch"),
            "deepspeed": version("deepspeed"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}",
            "rows": rows,
        }
        Path(options.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Start the ranks, print the table; 1 where the ways gave different tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        out = options.out or f"{directory}/report.json"
        words = [sys.executable, __file__, "--world", str(options.world), "--out", out]
        common = {**os.environ, "WORLD_SIZE": str(options.world), "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(free_port())
        ranks = [
            subprocess.Popen(
                words + ["--quick"] * options.quick, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(options.world)
        ]
        if any([rank.wait() for rank in ranks]):
            return 1
        rows = json.loads(Path(out).read_text(encoding="utf-8"))["rows"]
    print(table(rows))
    return 0 if all(row["same_tokens"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

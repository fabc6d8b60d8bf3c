"""Train a small T5 with random weights to reverse a sequence, and measure how often the whole result is correct.

Training and generation under ZeRO-3, on GPUs or as two processes on the CPU; metrics in OUTPUT_DIR/all_results.json:

    deepspeed --num_gpus 2 examples/copy_reverse.py --output_dir runs/copy-reverse

Any field of Seq2SeqTrainingArguments may follow (--max_steps 500, --zero_stage 2, --generation_num_beams 4). The
sequences that are generated for the metrics appear in no training pair.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_trainer import EvalPrediction, HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments

PAD, END = 0, 1
LETTERS = range(2, 10)
LONGEST = 4
HELD_OUT = 128
DEFAULTS: dict[str, Any] = {
    "zero_stage": 3,
    "predict_with_generate": True,
    "generation_max_length": 8,
    "max_steps": 300,
    "learning_rate": 5e-3,
    "warmup_steps": 20,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 64,
    "logging_steps": 50,
    "save_strategy": "no",
    "seed": 1,
    "disable_tqdm": True,
}


def pairs() -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Pairs to train on and pairs held out; no source is in both."""
    draw = random.Random(0)
    sources: set[tuple[int, ...]] = set()
    while len(sources) < 4_000:
        sources.add(tuple(draw.choices(LETTERS, k=draw.randint(3, LONGEST))))
    rows = [{"input_ids": [*source, END], "labels": [*reversed(source), END]} for source in sorted(sources)]
    draw.shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row."""

    def filled(name: str, fill: int) -> torch.Tensor:
        length = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [fill] * (length - len(row[name])) for row in rows])

    ids = filled("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": filled("labels", -100)}


def build_model() -> nn.Module:
    """A T5 of some 100 thousand parameters."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=LETTERS.stop,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
        )
    )


def exact_match(found: EvalPrediction) -> dict[str, float]:
    """Share of the sequences that are right from the first to the last letter."""

    def letters(row: Any) -> list[int]:
        return [int(token) for token in row if token in LETTERS]

    rows = zip(found.predictions, found.label_ids, strict=True)
    return {"exact_match": float(np.mean([letters(tokens) == letters(labels) for tokens, labels in rows]))}


def main(argv: Sequence[str]) -> None:
    """Train, then generate for the held-out pairs."""
    # The deepspeed launcher adds --local_rank, which is also in the environment.
    given = [argument for argument in argv if not argument.startswith("--local_rank")]
    usual = [f"--{name}={value}" for name, value in DEFAULTS.items()]
    (args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses([*usual, *given])
    torch.manual_seed(args.seed)
    train, held_out = pairs()
    trainer = Seq2SeqTrainer(build_model(), args, collate, train, {"held_out": held_out}, compute_metrics=exact_match)
    output = trainer.train()
    trainer.log_metrics("train", output.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Evaluate a causal language model without training: loss and perplexity of a text.

    python examples/evaluate_only.py --model DIR --output_dir runs/evaluated
    torchrun --nproc-per-node 8 examples/evaluate_only.py --model DIR --output_dir runs/evaluated --zero_stage 3

With --zero_stage 3 the weights are sharded over the ranks, so the model may be larger than a GPU. The result in
OUTPUT_DIR/eval_results.json does not depend on the number of ranks. DIR may be a checkpoint of ds_trainer.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from ds_trainer import HfArg, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Script:
    """Arguments of this script, in addition to those of the evaluation."""

    model: str = HfArg(help="Directory (or Hub name) of the model and its tokenizer.")
    text: str = HfArg(default="", help="A text file. Default: a module of Python's standard library.")
    sequence_length: int = HfArg(default=256, help="Tokens of one sample.")


def main() -> None:
    """Evaluate and write the metrics."""
    script, args = HfArgumentParser((Script, TrainingArguments)).parse_args_into_dataclasses()
    text = Path(script.text or Path(sysconfig.get_path("stdlib"), "heapq.py")).read_text(encoding="utf-8")
    tokens = AutoTokenizer.from_pretrained(script.model)(text)["input_ids"]
    length = script.sequence_length
    rows = [tokens[start : start + length] for start in range(0, len(tokens) - length, length)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(script.model, args, eval_dataset=data)
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()

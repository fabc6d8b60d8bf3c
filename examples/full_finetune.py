"""Fine-tune all weights of a causal language model in a local Hugging Face directory.

    python examples/full_finetune.py --model DIR --output_dir runs/finetuned
    torchrun --nproc-per-node 8 examples/full_finetune.py --model DIR --output_dir runs/finetuned --bf16 --zero_stage 3

DIR has config.json, weights and a tokenizer. Each rank reads only its own shards. Without --text the model is trained
on the sources of Python's standard library. Any field of TrainingArguments may follow. Load the result with
AutoModelForCausalLM.from_pretrained("runs/finetuned").
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from ds_trainer import HfArg, HfArgumentParser, Trainer, TrainingArguments

HELD_OUT_EVERY = 20


@dataclass
class Script:
    """Arguments of this script, in addition to those of the training."""

    model: str = HfArg(help="Directory with config.json, weights and a tokenizer.")
    text: list[str] = HfArg(default_factory=list, help="Text files. Default: sources of Python's standard library.")
    sequence_length: int = HfArg(default=256, help="Tokens of one sample.")


def samples(script: Script) -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Samples to train on and samples held out: the tokens of all files in a row, in equal lengths."""
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    library = Path(sysconfig.get_path("stdlib"))
    files = [Path(name) for name in script.text] or [library / f"{name}.py" for name in ("argparse", "ast", "heapq")]
    tokens: list[int] = []
    for file in files:
        tokens += tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
    starts = range(0, len(tokens) - script.sequence_length, script.sequence_length)
    rows = [tokens[start : start + script.sequence_length] for start in starts]
    data = [{"input_ids": row, "labels": row} for row in rows]
    held_out = data[::HELD_OUT_EVERY]
    return [row for number, row in enumerate(data) if number % HELD_OUT_EVERY], held_out


def main() -> None:
    """Train, evaluate, save."""
    script, args = HfArgumentParser((Script, TrainingArguments)).parse_args_into_dataclasses()
    train, held_out = samples(script)
    trainer = Trainer(
        script.model,  # the name: nothing is loaded here
        args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=AutoTokenizer.from_pretrained(script.model),
    )
    trainer.train()
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()

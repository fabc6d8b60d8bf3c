"""Train LoRA adapters on a causal language model, then merge them into its weights.

    pip install ds-trainer[hf,peft]
    python examples/lora.py --model DIR --output_dir runs/lora
    torchrun --nproc-per-node 8 examples/lora.py --model DIR --output_dir runs/lora --bf16 --zero_stage 3

OUTPUT_DIR gets adapter_model.safetensors and adapter_config.json, which peft loads. OUTPUT_DIR/merged gets a plain
model. Any field of TrainingArguments may follow.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_trainer import HfArg, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Script:
    """Arguments of this script, in addition to those of the training."""

    model: str = HfArg(help="Directory (or Hub name) of the base model and its tokenizer.")
    rank: int = HfArg(default=8, help="Rank of the adapters.")
    sequence_length: int = HfArg(default=256, help="Tokens of one sample.")


def samples(script: Script) -> list[dict[str, list[int]]]:
    """Source code of Python's standard library in samples of equal length."""
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    tokens = tokenizer(source)["input_ids"]
    starts = range(0, len(tokens) - script.sequence_length, script.sequence_length)
    rows = [tokens[start : start + script.sequence_length] for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train the adapters, save them, and save the merged model."""
    script, args = HfArgumentParser((Script, TrainingArguments)).parse_args_into_dataclasses()
    adapters = LoraConfig(r=script.rank, lora_alpha=2 * script.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Trainer(script.model, args, train_dataset=samples(script), peft_config=adapters)
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        base = AutoModelForCausalLM.from_pretrained(script.model)
        merged = PeftModel.from_pretrained(base, args.output_dir).merge_and_unload()
        merged.save_pretrained(Path(args.output_dir, "merged"))


if __name__ == "__main__":
    main()

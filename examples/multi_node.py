"""Pretrain a small Llama on several machines. Only the launcher needs to know machines and ranks, not the script.

    python examples/multi_node.py --output_dir runs/pretrained               # one process
    ds-trainer launch examples/multi_node.py --output_dir runs/pretrained    # all GPUs here, or of the SLURM allocation
    sbatch examples/multi_node.sbatch                                        # two nodes with eight GPUs each
    torchrun --nnodes 2 --node-rank N --master-addr HOST --nproc-per-node 8 examples/multi_node.py --output_dir OUT

Start it again with the same command after a crash, a time limit or a preemption: auto_resume continues from the newest
checkpoint, also on another number of machines. Any field of TrainingArguments may follow.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from ds_trainer import HfArgumentParser, Trainer, TrainingArguments

LENGTH = 128
DEFAULTS: dict[str, Any] = {
    "zero_stage": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "max_steps": 200,
    "logging_steps": 10,
    "save_steps": 100,
    "save_total_limit": 2,
    "auto_resume": True,
}


class Bytes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A text in samples of ``LENGTH`` bytes. Every rank opens the file; the Trainer decides which samples it reads."""

    def __init__(self, file: Path) -> None:
        self.text = torch.tensor(list(file.read_bytes()))

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": row, "labels": row}


def architecture() -> LlamaConfig:
    """Two small layers over bytes. Each rank draws only the weights that it holds."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    )


def main() -> None:
    """Train and save."""
    usual = [f"--{name}={value}" for name, value in DEFAULTS.items()]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*usual, *sys.argv[1:]])
    data = Bytes(Path(sysconfig.get_path("stdlib"), "argparse.py"))
    trainer = Trainer(args=args, model_init=architecture, train_dataset=data)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

"""Train a custom torch.nn.Module, without transformers and Hugging Face files.

    python examples/own_module.py --output_dir runs/own
    deepspeed --num_gpus 8 examples/own_module.py --output_dir runs/own --zero_stage 2

The module gets the items of a batch as keyword arguments, and returns the loss (or a dict with "loss"). Here it
predicts the next byte of Python's own sources from the eight bytes before it. Any field of TrainingArguments may
follow.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

from ds_trainer import HfArgumentParser, Trainer, TrainingArguments

CONTEXT = 8


class NextByte(nn.Module):
    """Predicts a byte from the ``CONTEXT`` bytes before it."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.body = nn.Sequential(nn.Linear(16 * CONTEXT, width), nn.GELU(), nn.Linear(width, 256))

    def forward(self, context: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and scores of ``context`` [batch, CONTEXT] and ``labels`` [batch]."""
        logits = self.body(self.embedding(context).flatten(1))
        # The mean over the samples of this micro-batch; the Trainer weights it by their number.
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Every position of a text as one sample."""

    def __init__(self, name: str) -> None:
        self.text = torch.tensor(list(Path(sysconfig.get_path("stdlib"), name).read_bytes()))

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        return {"context": self.text[start : start + CONTEXT], "labels": self.text[start + CONTEXT]}


def main() -> None:
    """Train, evaluate, save."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    trainer = Trainer(NextByte(), args, train_dataset=Windows("argparse.py"), eval_dataset=Windows("heapq.py"))
    trainer.train()
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()  # model.safetensors


if __name__ == "__main__":
    main()

"""A script as users of transformers have it: it knows nothing of ds_trainer. Prints the losses of its steps as JSON."""

import json
import os
import sys
from dataclasses import dataclass, field

import torch
from transformers import (
    EarlyStoppingCallback,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    """What the script itself wants to know."""

    width: int = field(default=32, metadata={"help": "Hidden size."})


class CountSteps(TrainerCallback):
    """Counts steps, as a callback of a user does."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


class PlainTrainer(Trainer):
    """Overrides a method with the signature of the reference."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)


def main() -> None:
    """Train a tiny model."""
    model_args, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    os.makedirs(args.output_dir, exist_ok=True)
    if get_last_checkpoint(args.output_dir) is not None:
        raise SystemExit("there is a checkpoint already")
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=model_args.width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens]
    counter = CountSteps()
    trainer = PlainTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=data[:48],
        eval_dataset=data[48:],
        callbacks=[counter, EarlyStoppingCallback(early_stopping_patience=9)],
    )
    result = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "losses": losses,
        "steps": counter.steps,
        "train_loss": result.training_loss,
        "eval_loss": trainer.evaluate()["eval_loss"],
        "trainer": type(trainer).__mro__[1].__module__,
        "zero_stage": getattr(args, "zero_stage", None),
        "origins": getattr(args, "origins", {}),
        "argv": sys.argv,
        "path": sys.path[0],
    }
    sys.stdout.write(f"found {json.dumps(found)}\n")  # one write, so that ranks do not mix their lines


if __name__ == "__main__":
    main()

"""Group relative policy optimization with TRL: text is generated inside the loop, and a function rewards it."""

import torch
from assets import llama_config, report, seeded, sentences, tokenizer
from datasets import Dataset
from transformers import LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser


def share_of_letters(completions, **kwargs) -> list[float]:
    """The reward: how much of a completion is letters."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


class Seed(TrainerCallback):
    """Draws the same random numbers in a step whatever was drawn before."""

    def on_step_begin(self, args, state, control, **kwargs):
        """The generation of a step follows."""
        torch.manual_seed(state.global_step)


def main() -> None:
    """Train and save."""
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config()
    data = Dataset.from_dict({"prompt": sentences(96)})
    trainer = GRPOTrainer(
        model=seeded(LlamaForCausalLM, llama_config()),
        reward_funcs=share_of_letters,
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=data.select(range(80, 88)),
        processing_class=tokenizer(),
        callbacks=[Seed()],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer)
    trainer.evaluate()


if __name__ == "__main__":
    main()

"""Odds ratio preference optimization with TRL's experimental trainer."""

from assets import llama_config, preferences, report, seeded, tokenizer
from transformers import LlamaForCausalLM
from trl import TrlParser
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


def main() -> None:
    """Train, evaluate and save."""
    (args,) = TrlParser((ORPOConfig,)).parse_args_and_config()
    data = preferences()
    trainer = ORPOTrainer(
        model=seeded(LlamaForCausalLM, llama_config()),
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=data.select(range(80, 96)),
        processing_class=tokenizer(),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, evaluation=trainer.evaluate())


if __name__ == "__main__":
    main()

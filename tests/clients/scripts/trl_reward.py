"""A reward model with TRL."""

from assets import llama_config, preferences, report, seeded, tokenizer
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer, TrlParser


def main() -> None:
    """Train, evaluate and save."""
    (args,) = TrlParser((RewardConfig,)).parse_args_and_config()
    data = preferences()
    trainer = RewardTrainer(
        model=seeded(LlamaForSequenceClassification, llama_config(num_labels=1)),
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

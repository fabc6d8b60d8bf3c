"""Kahneman-Tversky optimization with TRL."""

from assets import llama_config, preferences, report, seeded, tokenizer
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import KTOConfig, KTOTrainer, TrlParser


def labeled() -> Dataset:
    """A prompt, a completion, and whether it is a good one."""
    pairs = preferences(48)
    rows = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}
        for pair in pairs
        for good in (True, False)
    ]
    return Dataset.from_list(rows)


def main() -> None:
    """Train, evaluate and save."""
    (args,) = TrlParser((KTOConfig,)).parse_args_and_config()
    data = labeled()
    trainer = KTOTrainer(
        model=seeded(LlamaForCausalLM, llama_config()),
        ref_model=seeded(LlamaForCausalLM, llama_config()),
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

"""Masked language modeling; --masking: dynamic (in the collator) or static (once, with the data)."""

import math
from dataclasses import dataclass, field

import torch
import workflow
from assets import bert_config, language_modeling, tokenizer
from transformers import (
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)


@dataclass
class DataArguments:
    """What is masked."""

    masking: str = field(default="dynamic", metadata={"help": "dynamic: by the collator; static: once, with the data"})
    mlm_probability: float = field(default=0.15, metadata={"help": "share of the masked tokens"})
    max_seq_length: int = field(default=48, metadata={"help": "longer lines are cut"})


def main() -> None:
    """Train, evaluate and save."""
    model_args, data_args, args = workflow.parse(workflow.ModelArguments, DataArguments, TrainingArguments)
    tokens = tokenizer()
    model = workflow.model_of(model_args, BertForMaskedLM, bert_config())
    collator = DataCollatorForLanguageModeling(tokens, mlm_probability=data_args.mlm_probability)

    def tokenize(examples):
        encoded = tokens(
            examples["text"],
            truncation=True,
            max_length=data_args.max_seq_length,
            return_special_tokens_mask=data_args.masking == "dynamic",
        )
        if data_args.masking == "static":
            torch.manual_seed(args.seed)
            masked = [collator([{"input_ids": row}]) for row in encoded["input_ids"]]
            encoded["input_ids"] = [row["input_ids"][0].tolist() for row in masked]
            encoded["labels"] = [row["labels"][0].tolist() for row in masked]
        return encoded

    data = workflow.preprocessed(args, language_modeling(), tokenize, "texts")
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=data.select(range(80, 96)),
        processing_class=tokens,
        data_collator=collator if data_args.masking == "dynamic" else DataCollatorForTokenClassification(tokens),
    )

    def evaluate() -> dict[str, float]:
        torch.manual_seed(args.seed)
        metrics = trainer.evaluate()
        return metrics | {"perplexity": math.exp(metrics["eval_loss"])}

    workflow.run(trainer, args, evaluate)


if __name__ == "__main__":
    main()

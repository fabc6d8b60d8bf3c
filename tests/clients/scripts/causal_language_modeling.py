"""Causal language modeling: texts are concatenated and cut into blocks; the result is a perplexity."""

import math
from dataclasses import dataclass, field
from itertools import chain

import workflow
from assets import language_modeling, llama_config, tokenizer
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator


@dataclass
class DataArguments:
    """How the texts become samples."""

    block_size: int = field(default=32, metadata={"help": "tokens of a sample"})


def accuracy(results) -> dict[str, float]:
    """The share of next tokens that have the largest logit."""
    predictions, labels = results
    return {"accuracy": float((predictions[:, :-1] == labels[:, 1:]).mean())}


def main() -> None:
    """Train, evaluate and save."""
    model_args, data_args, args = workflow.parse(workflow.ModelArguments, DataArguments, TrainingArguments)
    tokens = tokenizer()
    model = workflow.model_of(model_args, LlamaForCausalLM, llama_config())

    def tokenize(examples):
        return tokens(examples["text"])

    def group(examples):
        joined = {name: list(chain(*lists)) for name, lists in examples.items()}
        end = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        blocks = {
            name: [values[start : start + data_args.block_size] for start in range(0, end, data_args.block_size)]
            for name, values in joined.items()
        }
        blocks["labels"] = [list(block) for block in blocks["input_ids"]]
        return blocks

    data = workflow.preprocessed(args, language_modeling(160), tokenize, "texts")
    data = workflow.preprocessed(args, data, group, "blocks")
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.select(range(24)),
        eval_dataset=data.select(range(24, 40)),
        processing_class=tokens,
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )

    def evaluate() -> dict[str, float]:
        metrics = trainer.evaluate()
        return metrics | {"perplexity": math.exp(metrics["eval_loss"])}

    workflow.run(trainer, args, evaluate)


if __name__ == "__main__":
    main()

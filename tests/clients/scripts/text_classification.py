"""Sequence classification with metrics, the best model at the end, and a file of predictions."""

from pathlib import Path

import numpy as np
import workflow
from assets import bert_config, sentences, tokenizer
from datasets import Dataset
from transformers import (
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)

LABELS = ("call", "assignment", "other")


def lines(number: int) -> Dataset:
    """Lines of code and what they are."""
    texts = sentences(number)
    kinds = ["call" if "(" in text else "assignment" if "=" in text else "other" for text in texts]
    return Dataset.from_dict({"text": texts, "label": [LABELS.index(kind) for kind in kinds]})


def metrics_of(results: EvalPrediction) -> dict[str, float]:
    """The share of right classes, and the mean logit of the right class."""
    logits = results.predictions[0] if isinstance(results.predictions, tuple) else results.predictions
    right = logits.argmax(-1) == results.label_ids
    chosen = np.take_along_axis(logits, results.label_ids[:, None], axis=1)
    return {"accuracy": float(right.mean()), "mean_logit": float(chosen.mean())}


def main() -> None:
    """Train, evaluate, predict and save."""
    model_args, args = workflow.parse(workflow.ModelArguments, TrainingArguments)
    tokens = tokenizer()
    config = bert_config(num_labels=len(LABELS), finetuning_task="text-classification")
    config.label2id = {name: number for number, name in enumerate(LABELS)}
    config.id2label = dict(enumerate(LABELS))
    model = workflow.model_of(model_args, BertForSequenceClassification, config)

    def tokenize(examples):
        encoded = tokens(examples["text"], truncation=True, max_length=64)
        encoded["label"] = examples["label"]
        return encoded

    data = workflow.preprocessed(args, lines(96), tokenize, "lines")
    held_out = data.select(range(80, 96))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=held_out,
        processing_class=tokens,
        data_collator=DataCollatorWithPadding(tokens),
        compute_metrics=metrics_of,
    )

    def predict() -> dict[str, float]:
        logits = trainer.predict(held_out.remove_columns("label"), metric_key_prefix="predict").predictions
        if trainer.is_world_process_zero():
            rows = [f"{number}\t{LABELS[label]}\n" for number, label in enumerate(logits.argmax(-1))]
            Path(args.output_dir, "predict_results.txt").write_text("index\tprediction\n" + "".join(rows))
        return {f"predict_logit_{place}": float(value) for place, value in np.ndenumerate(logits)}

    workflow.run(trainer, args, predict=predict)


if __name__ == "__main__":
    main()

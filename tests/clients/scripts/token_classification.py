"""Token classification: words with labels, subwords aligned with them, metrics of the entities."""

import numpy as np
import workflow
from assets import bert_config, sentences, tokenizer
from datasets import Dataset
from transformers import BertForTokenClassification, DataCollatorForTokenClassification, Trainer, TrainingArguments

LABELS = ("O", "KEYWORD", "NAME")
KEYWORDS = {"import", "from", "def", "return", "for", "in", "if", "not", "is", "class", "and", "or", "with", "as"}


def labeled_words(number: int) -> Dataset:
    """Words of lines, with a label each."""
    words = [text.split() for text in sentences(number)]
    kinds = [[1 if word in KEYWORDS else 2 if word.isidentifier() else 0 for word in line] for line in words]
    return Dataset.from_dict({"words": words, "kinds": kinds})


def metrics_of(results) -> dict[str, float]:
    """Precision, recall and F1 of the words that are not ``O``."""
    logits, labels = results
    counted = labels != -100
    predicted, wanted = np.argmax(logits, axis=2)[counted], labels[counted]
    right = float(((predicted == wanted) & (wanted != 0)).sum())
    precision = right / max(1, int((predicted != 0).sum()))
    recall = right / max(1, int((wanted != 0).sum()))
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(1e-12, precision + recall),
        "mean_logit": float(logits[counted].mean()),
    }


def main() -> None:
    """Train, evaluate, predict and save."""
    model_args, args = workflow.parse(workflow.ModelArguments, TrainingArguments)
    tokens = tokenizer()
    model = workflow.model_of(model_args, BertForTokenClassification, bert_config(num_labels=len(LABELS)))

    def tokenize_and_align(examples):
        encoded = tokens(examples["words"], truncation=True, max_length=64, is_split_into_words=True)
        encoded["labels"] = []
        for number, kinds in enumerate(examples["kinds"]):
            words = encoded.word_ids(number)
            first = [place == 0 or words[place] != words[place - 1] for place in range(len(words))]
            encoded["labels"].append([kinds[word] if start else -100 for word, start in zip(words, first, strict=True)])
        return encoded

    data = workflow.preprocessed(args, labeled_words(96), tokenize_and_align, "words")
    held_out = data.select(range(80, 96))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data.select(range(80)),
        eval_dataset=held_out,
        processing_class=tokens,
        data_collator=DataCollatorForTokenClassification(tokens, pad_to_multiple_of=8 if args.fp16 else None),
        compute_metrics=metrics_of,
    )

    def predict() -> dict[str, float]:
        predictions, labels, metrics = trainer.predict(held_out, metric_key_prefix="predict")
        assert predictions.shape[:2] == labels.shape
        return metrics

    workflow.run(trainer, args, predict=predict)


if __name__ == "__main__":
    main()

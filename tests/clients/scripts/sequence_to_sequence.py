"""What the scripts for sequence-to-sequence models have in common."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import workflow
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments


@dataclass
class DataArguments:
    """Lengths and generation."""

    max_source_length: int = field(default=48, metadata={"help": "longer sources are cut"})
    max_target_length: int = field(default=16, metadata={"help": "longer targets are cut"})
    num_beams: int | None = field(default=None, metadata={"help": "beams of the evaluation"})


def generate_and_train(kind, config, tokens, data, prefix: str = "") -> None:
    """Train a model of class ``kind`` on the columns ``source`` and ``target``; evaluate, predict and save."""
    model_args, data_args, args = workflow.parse(workflow.ModelArguments, DataArguments, Seq2SeqTrainingArguments)
    model = workflow.model_of(model_args, kind, config)

    def tokenize(examples):
        sources = [prefix + text for text in examples["source"]]
        encoded = tokens(sources, max_length=data_args.max_source_length, truncation=True)
        targets = tokens(text_target=examples["target"], max_length=data_args.max_target_length, truncation=True)
        encoded["labels"] = targets["input_ids"]
        return encoded

    def decoded(ids: np.ndarray) -> list[str]:
        ids = np.where(ids != -100, ids, tokens.pad_token_id)
        return [text.strip() for text in tokens.batch_decode(ids, skip_special_tokens=True)]

    def metrics_of(results) -> dict[str, float]:
        predictions, labels = results
        if isinstance(predictions, tuple):
            predictions = predictions[0]
        shared = [
            len(set(text.split()) & set(wanted.split())) / max(1, len(set(wanted.split())))
            for text, wanted in zip(decoded(predictions), decoded(labels), strict=True)
        ]
        lengths = [np.count_nonzero(row != tokens.pad_token_id) for row in predictions]
        kept = predictions[predictions > 0]
        return {
            "shared_words": float(np.mean(shared)),
            "gen_len": float(np.mean(lengths)),
            "mean_token": float(kept.mean()) if kept.size else 0.0,
        }

    data = workflow.preprocessed(args, data, tokenize, "texts")
    held_out = data.select(range(48, 64))
    args.generation_max_length = args.generation_max_length or data_args.max_target_length
    args.generation_num_beams = data_args.num_beams or args.generation_num_beams
    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=data.select(range(48)),
        eval_dataset=held_out,
        processing_class=tokens,
        data_collator=DataCollatorForSeq2Seq(tokens, model=model, pad_to_multiple_of=8 if args.fp16 else None),
        compute_metrics=metrics_of if args.predict_with_generate else None,
    )

    def predict() -> dict[str, float]:
        results = trainer.predict(held_out, metric_key_prefix="predict")
        if trainer.is_world_process_zero() and args.predict_with_generate:
            path = Path(args.output_dir, "generated_predictions.txt")
            path.write_text("\n".join(decoded(results.predictions)), encoding="utf-8")
        return results.metrics

    workflow.run(trainer, args, predict=predict)

"""Extractive question answering: a Trainer whose evaluation turns logits of features into answers of examples."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import workflow
from assets import bert_config, sentences, tokenizer
from datasets import Dataset
from transformers import BertForQuestionAnswering, EvalPrediction, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_utils import PredictionOutput, speed_metrics

LENGTH, STRIDE = 40, 8


def questions(number: int) -> Dataset:
    """A context of three lines, a question, and the word of the context that answers it."""
    lines = sentences(3 * number)
    rows = []
    for index in range(number):
        context = " ".join(lines[3 * index : 3 * index + 3])
        answer = lines[3 * index + index % 3].split()[1]
        rows.append(
            {
                "id": str(index),
                "question": f"what follows {lines[3 * index + index % 3].split()[0]}",
                "context": context,
                "answer": answer,
                "start": context.index(answer),
            }
        )
    return Dataset.from_list(rows)


class QuestionAnsweringTrainer(Trainer):
    """Evaluates and predicts answers."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        """``post_process_function(examples, features, logits, stage)`` returns an ``EvalPrediction`` of texts."""
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
        """Metrics of the answers; a file of them."""
        features = self.eval_dataset if eval_dataset is None else eval_dataset
        examples = self.eval_examples if eval_examples is None else eval_examples
        output = self._logits(self.get_eval_dataloader(features), "Evaluation", ignore_keys, metric_key_prefix)
        metrics = dict(output.metrics)
        if self.args.should_save:
            answers = self.post_process_function(examples, features, output.predictions, "eval")
            metrics |= self._prefixed(self.compute_metrics(answers), metric_key_prefix)
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, predict_dataset, predict_examples, ignore_keys=None, metric_key_prefix="test"):
        """The answers as predictions."""
        loader = self.get_test_dataloader(predict_dataset)
        output = self._logits(loader, "Prediction", ignore_keys, metric_key_prefix)
        answers = self.post_process_function(predict_examples, predict_dataset, output.predictions, "predict")
        metrics = self._prefixed(self.compute_metrics(answers), metric_key_prefix) | output.metrics
        return PredictionOutput(predictions=answers.predictions, label_ids=answers.label_ids, metrics=metrics)

    def _logits(self, loader, description, ignore_keys, prefix):
        import time

        compute_metrics, self.compute_metrics = self.compute_metrics, None
        start = time.time()
        try:
            output = self.evaluation_loop(
                loader,
                description=description,
                prediction_loss_only=None,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        steps = -(-output.num_samples // (self.args.eval_batch_size * self.args.world_size))
        output.metrics.update(speed_metrics(prefix, start, num_samples=output.num_samples, num_steps=steps))
        return output

    @staticmethod
    def _prefixed(metrics, prefix):
        return {f"{prefix}_{name}": value for name, value in metrics.items()}


def main() -> None:
    """Train, evaluate, predict and save."""
    model_args, args = workflow.parse(workflow.ModelArguments, TrainingArguments)
    tokens = tokenizer()
    model = workflow.model_of(model_args, BertForQuestionAnswering, bert_config())

    def features(examples):
        return tokens(
            examples["question"],
            examples["context"],
            truncation="only_second",
            max_length=LENGTH,
            stride=STRIDE,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )

    def training_features(examples):
        encoded = features(examples)
        encoded["start_positions"], encoded["end_positions"] = [], []
        samples = encoded.pop("overflow_to_sample_mapping")
        for number, offsets in enumerate(encoded.pop("offset_mapping")):
            first = examples["start"][samples[number]]
            last = first + len(examples["answer"][samples[number]])
            kinds = encoded.sequence_ids(number)
            inside = [
                place
                for place, (start, end) in enumerate(offsets)
                if kinds[place] == 1 and start < last and end > first
            ]
            encoded["start_positions"].append(inside[0] if inside else 0)
            encoded["end_positions"].append(inside[-1] if inside else 0)
        return encoded

    def evaluation_features(examples):
        encoded = features(examples)
        encoded["example_id"] = [examples["id"][sample] for sample in encoded.pop("overflow_to_sample_mapping")]
        encoded["offset_mapping"] = [
            [pair if kind == 1 else None for pair, kind in zip(pairs, encoded.sequence_ids(number), strict=True)]
            for number, pairs in enumerate(encoded["offset_mapping"])
        ]
        return encoded

    def answers(examples, features, logits, stage="eval"):
        # Logarithms of probabilities: the mean of the logits has no gradient, so rounding alone decides it.
        starts, ends = (values - np.log(np.exp(values).sum(axis=1, keepdims=True)) for values in logits)
        assert len(starts) == len(features), f"{len(starts)} predictions for {len(features)} features"
        of_example = defaultdict(list)
        for number, name in enumerate(features["example_id"]):
            of_example[name].append(number)
        texts = []
        for example in examples:
            best = (-np.inf, "")
            for number in of_example[example["id"]]:
                offsets = features[number]["offset_mapping"]
                for start in np.argsort(starts[number]).tolist():
                    for end in np.argsort(ends[number]).tolist():
                        if offsets[start] is None or offsets[end] is None or not start <= end < start + 12:
                            continue
                        text = example["context"][offsets[start][0] : offsets[end][1]]
                        best = max(best, (float(starts[number][start] + ends[number][end]), text))
            texts.append({"id": example["id"], "prediction_text": best[1], "score": best[0]})
        if trainer.is_world_process_zero():
            Path(args.output_dir, f"{stage}_predictions.json").write_text(json.dumps(texts))
        return EvalPrediction(predictions=texts, label_ids=examples["answer"])

    def metrics_of(results: EvalPrediction) -> dict[str, float]:
        exact = [row["prediction_text"] == answer for row, answer in zip(*results, strict=True)]
        scores = [row["score"] for row in results.predictions if np.isfinite(row["score"])]
        return {"exact_match": float(np.mean(exact)), "answered": len(scores), "mean_score": float(np.mean(scores))}

    examples = questions(32)
    held_out = examples.select(range(24, 32))
    evaluated = workflow.preprocessed(args, held_out, evaluation_features, "held-out questions")
    trainer = QuestionAnsweringTrainer(
        model=model,
        args=args,
        train_dataset=workflow.preprocessed(args, examples.select(range(24)), training_features, "questions"),
        eval_dataset=evaluated,
        eval_examples=held_out,
        processing_class=tokens,
        data_collator=default_data_collator,
        post_process_function=answers,
        compute_metrics=metrics_of,
    )

    def predict() -> dict[str, float]:
        return trainer.predict(evaluated, held_out, metric_key_prefix="predict").metrics

    workflow.run(trainer, args, predict=predict)


if __name__ == "__main__":
    main()

"""The task ``classification``: the label of a text, or of a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ds_trainer.recipes.recipe import Recipe
from ds_trainer.recipes.task_data import Reading
from ds_trainer.recipes.task_job import TaskJob, task_tokenizer
from ds_trainer.samples.sources.marks import ReadKeys
from ds_trainer.samples.sources.record import BadRecord, Record
from ds_trainer.samples.sources.rows import SourceRow
from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.units import whole_number

if TYPE_CHECKING:
    from ds_trainer.arguments.training_arguments import TrainingArguments
    from ds_trainer.training.trainer import Trainer

_KIND = "classification"
# Heads of the model classes for sequences, which no language model's files have.
_HEADS = ("score.*", "classifier.*", "pre_classifier.*", "*pooler*", "classification_head.*", "head.*")


class ClassificationJob(TaskJob):
    """Trains a classifier of texts, or of pairs of texts."""

    tokenizer: Any
    labels: Sequence[str]

    def reading(self) -> Reading:
        """A text, perhaps a second one, and a label."""
        rows = LabeledRows(self.recipe)
        return Reading(_KIND, _KIND, lambda record: record.fields, __name__, rows, options=vars(rows))

    def prepare(self, args: TrainingArguments) -> Sequence[str]:
        """Load the tokenizer; read the samples and their labels."""
        self.tokenizer = task_tokenizer(self.recipe)
        lines = super().prepare(args)
        self.labels = sorted(self.data.train.unique("label"), key=_order)
        labels = self.labels
        evaluation = [] if self.data.eval is None else self.data.eval.unique("label")
        problems = []
        if len(labels) < 2:
            problems.append(f"data.train has one label only ({', '.join(labels)}); a classifier needs two or more.")
        unknown = [label for label in evaluation if label not in labels]
        problems += [f"data: the label {label!r} of evaluation is not in the training data." for label in unknown]
        if problems:
            raise ConfigError(problems)
        return lines

    def make_trainer(self, args: TrainingArguments) -> Trainer:
        """The Trainer, with metrics of a classifier."""
        from transformers import DataCollatorWithPadding

        from ds_trainer.training.trainer import Trainer

        tokenizer, length = self.tokenizer, self.recipe.tokens_per_sample
        train, evaluation = self.data.train, self.data.eval
        return Trainer(
            _model(self.recipe, self.labels, tokenizer, args),
            args,
            train_dataset=LabeledTexts(train, self.labels, tokenizer, length),
            eval_dataset=None if evaluation is None else LabeledTexts(evaluation, self.labels, tokenizer, length),
            data_collator=DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
            compute_metrics=classification_metrics,
        )


class LabeledRows:
    """Makes a record of a row with a text, perhaps a second one, and a label."""

    def __init__(self, recipe: Recipe) -> None:
        options = recipe.task.options
        self.text_key = recipe.data.text_key or "text"
        self.label_key = str(options.get("label_key", "label"))
        self.pair_key: str | None = options.get("text_pair_key")

    def __call__(self, row: SourceRow) -> Record:
        """The record.

        Raises:
            BadRecord: a key is missing, a text is none, or the label is neither a text nor an integer.
        """
        if not isinstance(row.value, Mapping):
            raise BadRecord(f"expected a mapping with {self.text_key!r} and {self.label_key!r}")
        values = ReadKeys(row.value)
        fields = {"text": self._text(values, self.text_key), "label": self._label(values)}
        if self.pair_key is not None:
            fields["pair"] = self._text(values, self.pair_key)
        return Record(row.where, _KIND, fields, values.unread())

    def _text(self, value: Mapping[str, Any], key: str) -> str:
        text = self._of(value, key)
        if not isinstance(text, str) or not text.strip():
            raise BadRecord(f"{key!r} must be a text that is not empty, got {text!r}")
        return text

    def _label(self, value: Mapping[str, Any]) -> str:
        label = self._of(value, self.label_key)
        if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
            raise BadRecord(f"{self.label_key!r} must be the name or the number of a class, got {label!r}")
        return str(label)

    def _of(self, value: Mapping[str, Any], key: str) -> Any:
        if key not in value:
            listed = ", ".join(map(repr, list(value)[:12])) or "none"
            raise BadRecord(f"no key {key!r}; found {listed}.{did_you_mean(key, list(value))}")
        return value[key]


def _order(label: str) -> tuple[int, int, str]:
    """Numbers in their order, then names."""
    number = whole_number(label.removeprefix("-"))
    return (1, 0, label) if number is None else (0, -number if label.startswith("-") else number, "")


class LabeledTexts(torch.utils.data.Dataset[dict[str, Any]]):
    """``input_ids``, ``attention_mask`` and ``labels`` (the number of the class), tokenized when they are read."""

    def __init__(self, rows: Any, labels: Sequence[str], tokenizer: Any, length: int) -> None:
        self._rows, self._tokenizer, self._length = rows, tokenizer, length
        self._numbers = {label: number for number, label in enumerate(labels)}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        fields = self._rows[index]
        encoded = self._tokenizer(fields["text"], fields.get("pair"), truncation=True, max_length=self._length)
        return {**encoded, "labels": self._numbers[fields["label"]]}


def _model(recipe: Recipe, labels: Sequence[str], tokenizer: Any, args: Any) -> Any:
    from ds_trainer.training.loading.peft_adapters import make_peft_config
    from ds_trainer.training.loading.pretrained import from_pretrained

    spec = recipe.model
    if spec.path is None:
        raise ConfigError(f"{recipe.where('model')}: task classification starts from a trained model; set model.path.")
    peft_config = None
    if spec.peft is not None:
        where = f"{recipe.where('model.peft')}: model.peft"
        peft_config = make_peft_config({"task_type": "SEQ_CLS", **spec.peft}, where)
    options: dict[str, Any] = {} if spec.quantization is None else {"quantization_config": spec.quantization}
    allowed = args.allow_new_weights or list(_HEADS)
    return from_pretrained(
        spec.path,
        spec.auto_class or "AutoModelForSequenceClassification",
        dtype=spec.dtype or "float32",
        peft_config=peft_config,
        allow_new_weights=allowed,
        seed=args.seed,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )


def classification_metrics(prediction: Any) -> dict[str, float]:
    """Accuracy, and the mean F1 over the classes that occur (macro)."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    guessed, true = np.argmax(logits, -1), np.asarray(prediction.label_ids)
    scores = []
    for label in np.union1d(guessed, true):
        hits = float(np.sum((guessed == label) & (true == label)))
        scores.append(2 * hits / float(np.sum(guessed == label) + np.sum(true == label)))
    return {"accuracy": float(np.mean(guessed == true)), "f1_macro": float(np.mean(scores))}

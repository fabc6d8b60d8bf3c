"""``Seq2SeqTrainingArguments``: the options of :class:`~ds_trainer.training.seq2seq_trainer.Seq2SeqTrainer`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ds_trainer.arguments.checks.generation_checks import generation_problems, is_json
from ds_trainer.arguments.field_topics import topic
from ds_trainer.arguments.training_arguments import TrainingArguments

_evaluation = topic("Evaluation and metrics")
_data = topic("Data loading")


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """:class:`TrainingArguments` plus the arguments of sequence-to-sequence evaluation."""

    sortish_sampler: bool = _data("Batches of samples with similar lengths, in roughly random order.", False)
    predict_with_generate: bool = _evaluation("Generate text in evaluation, for metrics on it.", False)
    generation_max_length: int | None = _evaluation("Maximum length of a generated sequence.")
    generation_num_beams: int | None = _evaluation("Number of beams in generation.")
    generation_config: Any = _evaluation("GenerationConfig, its fields as a mapping, or the path of its file.")

    def problems(self) -> list[str]:
        """As for :class:`TrainingArguments`, plus those of :mod:`ds_trainer.arguments.checks.generation_checks`."""
        return [*super().problems(), *generation_problems(self)]

    def fill_in(self) -> None:
        """As for :class:`TrainingArguments`; also reads ``generation_config`` from JSON text."""
        super().fill_in()
        if isinstance(self.generation_config, str) and is_json(self.generation_config):
            self.generation_config = json.loads(self.generation_config)

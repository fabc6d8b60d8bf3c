"""``Seq2SeqTrainingArguments``: the options of :class:`~ds_trainer.training.seq2seq_trainer.Seq2SeqTrainer`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.arguments.enums import SamplingStrategy
from ds_trainer.arguments.field_topics import topic
from ds_trainer.arguments.training_arguments import TrainingArguments
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import exists, parse_json, read_user_json, shortened

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
        """As for :class:`TrainingArguments`, plus those of the generation arguments."""
        return [*super().problems(), *generation_problems(self)]

    def fill_in(self) -> None:
        """As for :class:`TrainingArguments`; also reads ``generation_config`` from JSON text."""
        super().fill_in()
        if isinstance(self.generation_config, str) and is_json(self.generation_config):
            self.generation_config = parse_json(self.generation_config)


FILE_NAME = "generation_config.json"
"""Name of the file that ``GenerationConfig.save_pretrained`` writes."""

_FORMS = (
    "Give a GenerationConfig, its fields as a mapping, or the path of a file or directory that "
    "GenerationConfig.save_pretrained wrote."
)


def generation_problems(args: Seq2SeqTrainingArguments) -> Iterator[str]:
    """One sentence for each invalid value."""
    if args.sortish_sampler and str(args.train_sampling_strategy) != SamplingStrategy.RANDOM:
        yield (
            f"sortish_sampler=True and train_sampling_strategy={args.train_sampling_strategy} are two orders of the "
            "samples; keep one of them."
        )
    if problem := _config_problem(args.generation_config):
        yield f"generation_config={problem} {_FORMS}"


def _config_problem(value: Any) -> str | None:
    """The value and what is wrong with it. The Trainer checks the fields; it knows them."""
    if value is None or isinstance(value, Mapping):
        return None
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        return _text_problem(text) if is_json(text) else _path_problem(text)
    if callable(getattr(value, "validate", None)) and callable(getattr(value, "to_dict", None)):
        return None
    return f"{value!r}: a {type(value).__name__} is not a generation configuration."


def is_json(text: str) -> bool:
    """Whether ``text`` is JSON rather than a path."""
    return text.lstrip().startswith("{")


def _text_problem(text: str) -> str | None:
    try:
        parse_json(text)
    except (ValueError, RecursionError) as error:
        return f"{shortened(text)!r} is not valid JSON ({error})."
    return None


def _path_problem(text: str) -> str | None:
    path = Path(os.path.expanduser(text))
    if exists(path) and path.is_dir():
        return None if (path / FILE_NAME).is_file() else f"{text!r}: the directory has no {FILE_NAME}."
    if exists(path):
        try:
            content = read_user_json(path, repr(text))
        except ConfigError as error:
            return str(error)
        return None if isinstance(content, dict) else f"{text!r}: the file does not hold a mapping."
    # A path that does not exist may be a model on the Hub: "name" or "owner/name".
    hub_name = text and not text.endswith(".json") and not text.startswith((".", "/", "~")) and text.count("/") <= 1
    return None if hub_name else f"{shortened(text)!r} does not exist (looked in {Path.cwd()})."

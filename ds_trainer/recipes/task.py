"""``TaskSpec``: the section ``task`` of a recipe: what the model learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_trainer.arguments.checks.value_checks import distillation_problems
from ds_trainer.arguments.yaml_reader import Located

TRL_TASKS = ("dpo", "reward")
LIBRARY_TASKS = (*TRL_TASKS, "embedding")
_OWN_OPTIONS = {
    "classification": ("label_key", "text_pair_key"),
    "embedding": ("loss", "loss_options", "mini_batch_size", "pooling", "evaluation"),
}


@dataclass(frozen=True)
class TaskSpec:
    """What the model learns. ``task: dpo`` is short for ``task: {name: dpo}``.

    Attributes:
        name: ``sft``: the next token, of text or of answers in conversations. ``dpo``: to prefer the chosen answer over
            the rejected one (TRL's DPOTrainer). ``reward``: a score that is higher for the chosen answer (TRL's
            RewardTrainer). ``classification``: the label of a text. ``embedding``: vectors of texts whose similarity
            is what the samples say (sentence-transformers). ``vision_language``: as ``sft``, for conversations with
            images (a model of AutoModelForImageTextToText, with its processor).
        options: for ``dpo``, ``reward`` and ``embedding``: fields of the library's arguments: DPOConfig, RewardConfig,
            SentenceTransformerTrainingArguments. For ``embedding`` also ``loss`` (a loss of the library, by its name),
            ``loss_options`` (its arguments), ``mini_batch_size`` (of a loss that caches gradients), ``pooling`` of a
            model that has none (default: mean), and ``evaluation`` (false: the loss only). For ``classification``:
            ``label_key`` (default: label) and ``text_pair_key``, the key of a second text.
    """

    name: Literal["sft", "vision_language", "dpo", "reward", "classification", "embedding"] = "sft"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def uses_library(self) -> bool:
        """Whether a library's trainer does it, which needs this package's classes in the place of transformers'."""
        return self.name in LIBRARY_TASKS

    @property
    def library_options(self) -> dict[str, Any]:
        """The options that are fields of the library's arguments."""
        return {key: value for key, value in self.options.items() if key not in _OWN_OPTIONS.get(self.name, ())}

    @property
    def is_next_token(self) -> bool:
        """Whether the next token is learned, with the loss of a language model."""
        return self.name in ("sft", "vision_language")

    def problems(self, data: Mapping[str, Any], arguments: Mapping[str, Any], freeze: Sequence[str] = ()) -> list[str]:
        """What cannot work with the values of the other sections, as one sentence per problem."""
        if self.name != "sft" and data.get("max_length") is None and arguments.get("max_length") is None:
            return [f"task {self.name} takes samples, not text in blocks; set data.max_length, the most tokens of one."]
        if not self.is_next_token and data.get("streaming"):
            return [f"task {self.name} cannot stream its data; remove data.streaming."]
        if self.is_next_token and self.options:
            return [f"task.options: {self.name} has no options ({', '.join(self.options)}); remove them."]
        if freeze and not self.is_next_token:
            return [f"model.freeze: task {self.name} trains all weights, or adapters; remove freeze."]
        if self.name == "vision_language":
            problems = [
                f"arguments.{name}={arguments[name]}: not with images ({reason}); remove it."
                for name, reason in _OF_TEXT.items()
                if arguments.get(name) is True or (arguments.get(name) or 1) > 1
            ]
            if data.get("long_samples") == "split":
                problems.append("data.long_samples=split: only texts can be split; choose drop, error or truncate.")
            if data.get("tokenizer") is not None:
                problems.append("data.tokenizer: the processor of model.path has its tokenizer; remove it.")
            return problems
        unknown = list(self.library_options)
        if self.name == "classification" and unknown:
            return [f"task.options: {', '.join(unknown)}: classification has the options label_key and text_pair_key."]
        return []


_OF_TEXT = {
    "packing": "an image would have to keep its place in a row with other samples",
    "tensor_parallel_size": "vision towers are not divided",
    "context_parallel_size": "the tokens of an image are not divided",
    "sequence_parallel_size": "the tokens of an image are not divided",
}


_SHORT_FORMS = {"task": "name", "distillation": "teacher"}


def complete_short_forms(root: dict[str, Located]) -> None:
    """Write ``task: NAME`` in the tree of a recipe as ``task: {name: NAME}``, and ``distillation: PATH`` likewise."""
    for section, key in _SHORT_FORMS.items():
        entry = root.get(section)
        if entry is not None and entry.value is not None and not isinstance(entry.value, dict | list):
            root[section] = Located({key: entry}, entry.where)


@dataclass(frozen=True)
class DistillationSpec:
    """A teacher, whose distribution over the next token the model learns. ``distillation: PATH`` names the teacher.

    Attributes:
        teacher: directory or Hub name of a language model with the tokenizer of the model that is trained.
        temperature: divides the logits of both; above 1, unlikely tokens count more.
        hard_loss_weight: weight of the loss against the data, from 0 to 1; the rest is that of the divergence from the
            teacher.
        divergence: ``forward_kl``: the model covers all that the teacher may say. ``reverse_kl``: it says what the
            teacher finds likely.
        dtype: type of the teacher's weights; default: that of the run's precision (``bf16``), else float32.
    """

    teacher: str | None = None
    temperature: float = 1.0
    hard_loss_weight: float = 0.1
    divergence: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    dtype: str | None = None

    def problems(self, task: str) -> list[str]:
        """What cannot work, as one sentence per problem; ``task`` is that of the recipe."""
        problems = list(distillation_problems(self.temperature, self.hard_loss_weight, self.divergence))
        if self.teacher is None:
            problems.append("distillation.teacher is missing; give the directory or the Hub name of a language model.")
        if task != "sft":
            problems.append(f"distillation is for task sft, not {task}; remove one of them.")
        return problems

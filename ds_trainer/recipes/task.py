"""``TaskSpec``: the section ``task`` of a recipe: what the model learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_trainer.arguments.yaml_reader import Located

TRL_TASKS = ("dpo", "reward")


@dataclass(frozen=True)
class TaskSpec:
    """What the model learns. ``task: dpo`` is short for ``task: {name: dpo}``.

    Attributes:
        name: ``sft``: the next token, of text or of answers in conversations. ``dpo``: to prefer the chosen answer over
            the rejected one (TRL's DPOTrainer). ``reward``: a score that is higher for the chosen answer (TRL's
            RewardTrainer). ``classification``: the label of a text.
        options: for ``dpo`` and ``reward``: fields of TRL's DPOConfig and RewardConfig, such as ``beta``. For
            ``classification``: ``label_key`` (default: label) and ``text_pair_key``, the key of a second text.
    """

    name: Literal["sft", "dpo", "reward", "classification"] = "sft"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def uses_trl(self) -> bool:
        """Whether a trainer of TRL does it, which needs this package's classes in the place of transformers'."""
        return self.name in TRL_TASKS

    def problems(self, data: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
        """What cannot work with the values of the other sections, as one sentence per problem."""
        if self.name != "sft" and data.get("max_length") is None and arguments.get("max_length") is None:
            return [f"task {self.name} takes samples, not text in blocks; set data.max_length, the most tokens of one."]
        if self.name != "sft" and data.get("streaming"):
            return [f"task {self.name} cannot stream its data; remove data.streaming."]
        if self.name == "sft" and self.options:
            return [f"task.options: sft has no options ({', '.join(self.options)}); remove them."]
        unknown = [key for key in self.options if key not in ("label_key", "text_pair_key")]
        if self.name == "classification" and unknown:
            return [f"task.options: {', '.join(unknown)}: classification has the options label_key and text_pair_key."]
        return []


def complete_short_form(root: dict[str, Located]) -> None:
    """Write ``task: NAME`` in the tree of a recipe as ``task: {name: NAME}``."""
    given = root.get("task")
    if given is not None and given.value is not None and not isinstance(given.value, dict | list):
        root["task"] = Located({"name": given}, given.where)

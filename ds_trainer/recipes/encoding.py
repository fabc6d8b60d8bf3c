"""From records to tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds_trainer.data.sources.record import Record
from ds_trainer.recipes.recipe import Recipe
from ds_trainer.utils.errors import ConfigError

IGNORED = -100


class TextEncoder:
    """Texts, each with the end-of-text token, and prompts with a completion that alone is trained on.

    Args:
        tokenizer: of transformers.
        max_length: most tokens of a sample.
        long_samples: ``truncate``, ``drop``, ``split`` or ``error``.
    """

    def __init__(self, tokenizer: Any, max_length: int, long_samples: str) -> None:
        self.tokenizer, self.max_length, self.long_samples = tokenizer, max_length, long_samples

    def __call__(self, record: Record) -> list[dict[str, np.ndarray]]:
        """The samples of ``record``.

        Raises:
            ConfigError: it is a conversation, or too long and ``long_samples`` is ``error``.
        """
        fields = record.fields
        if record.kind == "text":
            prompt, text = [], fields["text"]
        elif record.kind == "prompt_completion" and isinstance(fields["prompt"], str):
            prompt, text = self._ids(fields["prompt"]), fields["completion"]
        else:
            raise ConfigError(f"{record.source}: conversations need a chat template.")
        tokens = np.asarray([*prompt, *self._ids(text), self.tokenizer.eos_token_id], np.int32)
        labels = tokens.copy()
        labels[: len(prompt)] = IGNORED
        parts = range(0, len(tokens), self.max_length)
        if len(parts) > 1 and self.long_samples == "error":
            raise ConfigError(
                f"{record.source}: {len(tokens)} tokens are more than data.max_length={self.max_length}; set "
                "data.long_samples to truncate, drop or split, or a larger data.max_length."
            )
        if len(parts) > 1 and self.long_samples == "drop":
            return []
        parts = parts if self.long_samples == "split" else parts[:1]
        cuts = [slice(start, start + self.max_length) for start in parts]
        return [{"input_ids": tokens[cut], "labels": labels[cut]} for cut in cuts]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))


def make_encode(recipe: Recipe, tokenizer: Any) -> TextEncoder:
    """What gives the samples of a record, with the options of ``recipe``."""
    return TextEncoder(tokenizer, recipe.tokens_per_sample, recipe.data.long_samples)

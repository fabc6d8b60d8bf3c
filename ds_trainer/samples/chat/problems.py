"""What can be wrong with a sample: what refuses it, and what is only counted."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from ds_trainer.utils.errors import ConfigError


class SampleProblem(ConfigError):
    """A record that cannot become a sample.

    Attributes:
        source: where the record was read.
        reason: the key of the problem in counts, such as ``no_trained_token``.
    """

    def __init__(self, source: str, reason: str, message: str) -> None:
        super().__init__(f"{source}: {message}")
        self.source = source
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple[type[SampleProblem], tuple[str, str, str]]:
        return SampleProblem, (self.source, self.reason, self.message)


class RenderError(ValueError):
    """The template cannot render a conversation; the message is the template's own."""


_UNREAD = "unread_key:"


def unread_key(name: str) -> str:
    """The notice that no rule has read a key of the sample."""
    return f"{_UNREAD}{name}"


def unread_of(notices: Mapping[str, int]) -> dict[str, int]:
    """The keys among ``notices`` that were not read, with the number of samples."""
    return {key.removeprefix(_UNREAD): count for key, count in notices.items() if key.startswith(_UNREAD)}


def unread_lines(unread: Mapping[str, int]) -> list[str]:
    """One line that names the keys, those of most samples first; none if there are none."""
    ordered = sorted(unread.items(), key=lambda entry: (-entry[1], entry[0]))
    groups = [(count, [key for key, _ in entries]) for count, entries in groupby(ordered, key=lambda entry: entry[1])]
    shown = [f"{', '.join(keys)} (in {count:,} sample{'s' if count > 1 else ''})" for count, keys in groups]
    return [f"keys not used: {', '.join(shown)}"] if shown else []


# What is counted in samples that are kept. Each completes the sentence "N samples: ...".
NOTICES = {
    "truncated": "longer than max_length; their first tokens are kept",
    "split": "texts longer than max_length, cut into several samples",
    "dropped": "longer than max_length and dropped",
    "reasoning_not_rendered": (
        "the template leaves out reasoning of their messages (most do in earlier turns); train_on: last_turn trains "
        "only on turns with their reasoning"
    ),
    "empty_reasoning": (
        "an empty reasoning block is trained on, which teaches the model not to reason; with reasoning in the data, or "
        "the template's switch (enable_thinking: false), it is not"
    ),
    "generation_prompt_differs": (
        "the template's generation prompt has text that the conversation lacks (an opened reasoning block), so that "
        "the model is trained on another start of its answers than it gets when it generates"
    ),
    "earlier_text_differs": (
        "the template writes earlier messages differently once an answer follows, so that the model is trained on "
        "another context than it gets when it generates"
    ),
    "content_not_rendered": "the template leaves out the text of a system or user message",
    "end_of_turn_differs": (
        "the template closes earlier answers with another token than the last one; that token is not trained on"
    ),
    "no_end_of_turn": "the trained part ends without a special token, so that the model does not learn to stop",
    "prompt_in_markers": "the template's generation markers include the generation prompt; it is not trained on",
    "end_of_turn_not_in_markers": "the template's generation markers leave out the end-of-turn token; it is trained on",
    "split_token": "a token would lie across a border of the trained part; both sides are tokenized separately",
    "tools_not_rendered": "the template ignores their tools",
    "special_token_in_text": "text of prompts has special tokens of the tokenizer, which become control tokens",
}

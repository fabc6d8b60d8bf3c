"""The options of encoding: everything besides the tokenizer that decides the tokens and labels of a record."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_trainer.utils.errors import ConfigError

TRAIN_ON = ("assistant", "last_turn", "all")
LONG_SAMPLES = ("truncate", "drop", "split", "error")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class EncodeOptions:
    """How records become samples. Can be hashed and compared: part of the key of a prepared dataset.

    Attributes:
        chat_template: the text of the template (Jinja); None: the tokenizer's own. Names and files are resolved to
            their text by :func:`ds_trainer.samples.chat.templates.load_template`, so that the key has the text.
        train_on: ``assistant`` (all assistant turns), ``last_turn`` (the assistant messages after the last user
            message that is answered), ``all`` (every token), or a tuple of roles. The key ``train`` of a message
            overrides it.
        max_length: the most tokens of a sample; None: no limit.
        long_samples: what happens to a longer sample: ``truncate`` keeps its first tokens, ``drop`` removes it,
            ``split`` cuts a text (no conversation) into several samples, ``error`` refuses it.
        template_kwargs: further variables of the template, as pairs: ``(("enable_thinking", False),)``.
        date: what a template that asks for the current date gets (ISO format), so that samples do not depend on the
            day they are made on.

    Raises:
        ConfigError: a value cannot work; lists all.
    """

    chat_template: str | None = None
    train_on: str | tuple[str, ...] = "assistant"
    max_length: int | None = None
    long_samples: str = "truncate"
    template_kwargs: tuple[tuple[str, Any], ...] = ()
    date: str = "2025-01-01"

    def __post_init__(self) -> None:
        if not isinstance(self.train_on, str):
            roles = tuple(self.train_on)
            object.__setattr__(self, "train_on", "assistant" if roles == ("assistant",) else roles)
        if isinstance(self.template_kwargs, Mapping):
            object.__setattr__(self, "template_kwargs", tuple(sorted(self.template_kwargs.items())))
        if problems := self._problems():
            raise ConfigError(problems)

    def _problems(self) -> list[str]:
        problems = []
        if isinstance(self.train_on, str):
            if self.train_on not in TRAIN_ON:
                problems.append(
                    f"train_on={self.train_on!r} is not one of {', '.join(TRAIN_ON)}; for roles give a list: "
                    f"[{self.train_on}]."
                )
        elif unknown := [role for role in self.train_on or ("",) if role not in ROLES]:
            problems.append(f"train_on: {', '.join(map(repr, unknown))} is no role; the roles are {', '.join(ROLES)}.")
        if self.max_length is not None and self.max_length < 2:
            problems.append(f"max_length={self.max_length} must be 2 or more tokens.")
        if self.long_samples not in LONG_SAMPLES:
            problems.append(f"long_samples={self.long_samples!r} is not one of {', '.join(LONG_SAMPLES)}.")
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            problems.append(f"date={self.date!r} is not a date like 2025-01-31.")
        return problems

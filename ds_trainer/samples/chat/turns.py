"""Where the turns of a conversation are in its rendered text, for any template.

The start of turn i is where the text that the model would be given, ``render(messages[:i], prompt)``, ends in the text
of the whole conversation; its end is where ``render(messages[:i + 1])`` ends. Mostly both are prefixes of the whole
text. Templates that change earlier turns once later ones exist (they drop reasoning, for example) need more: a sentinel
is inserted into a message near the border, in the whole and in the shorter conversation. If removing it gives both
texts back, its position is the same place in both, and what follows in the shorter text must follow in the whole text.
Only what is shown in this way is used; otherwise the sample is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ds_trainer.samples.chat.messages import Conversation, Message, Untrained, with_inserted, with_inserted_at
from ds_trainer.samples.chat.problems import RenderError
from ds_trainer.samples.chat.rendering import SENTINEL, Renderer


class TextSpan(NamedTuple):
    """Characters ``start`` to ``end`` (exclusive) of a text."""

    start: int
    end: int


class _Border(NamedTuple):
    """The whole text should have ``tail`` at position ``start``; ``key`` names the way it was found."""

    key: int
    start: int
    tail: str


class Turns:
    """The spans of the messages of one conversation.

    Args:
        renderer: the template.
        conversation: the messages.
        special: matches every special and added token of the tokenizer.

    Attributes:
        text: the whole rendered text.
        notices: what was found on the way (keys of :data:`ds_trainer.samples.chat.problems.NOTICES`).

    Raises:
        RenderError: the template cannot render the conversation.
    """

    def __init__(self, renderer: Renderer, conversation: Conversation, special: re.Pattern[str]) -> None:
        self._renderer = renderer
        self._messages = conversation.messages
        self._tools = conversation.tools
        self._special = special
        self.text = renderer.render(self._messages, self._tools)
        self.notices: set[str] = set()

    def generated(self, index: int) -> TextSpan | None:
        """What the model generates in the assistant turn ``index``, with its end-of-turn token; None: not found."""
        start = self._start(index)
        if start is None:
            return None
        end = len(self.text) if index == len(self._messages) - 1 else self._end(index)
        return None if end is None or end < start else TextSpan(start, self._trimmed(start, end))

    def written(self, index: int) -> TextSpan | None:
        """The text of the message ``index`` of any role, with the token that ends it if it has one."""
        content = self._messages[index]["content"]
        if not content.strip():
            return None
        marked = [*self._messages]
        stripped = content.lstrip()
        marked[index] = {**marked[index], "content": content[: len(content) - len(stripped)] + SENTINEL + stripped}
        start = self._position(marked, self.text)
        marked[index] = next(with_inserted(self._messages[index], SENTINEL))
        content_end = self._position(marked, self.text)
        if start is None or content_end is None or content_end < start:
            return None
        end = len(self.text) if index == len(self._messages) - 1 else self._end(index)
        # A message that is written as a part of another one has no end of its own.
        end = content_end if end is None or end < content_end else end
        return TextSpan(start, self._trimmed(start, end))

    def part(self, index: int, part: Untrained) -> TextSpan | None:
        """A part of a text of the message ``index``, empty where the template leaves the text out; None: not found."""
        text = self._messages[index][part.key]
        if self._leaves_out(index, part):
            return TextSpan(0, 0)
        inner = text[part.start : part.end]
        # A template that trims a text writes no white space at its ends: what is not written is not trained on either.
        first = part.start + len(inner) - len(inner.lstrip())
        last = part.start + len(inner.rstrip())
        start, end = (
            next((place for at in places if (place := self._character(index, part.key, at)) is not None), None)
            for places in ((part.start, first), (part.end, last))
        )
        return None if start is None or end is None or end < start else TextSpan(start, end)

    def _character(self, index: int, key: str, position: int) -> int | None:
        marked = [*self._messages]
        marked[index] = with_inserted_at(self._messages[index], SENTINEL, key, position)
        return self._position(marked, self.text)

    def _leaves_out(self, index: int, part: Untrained) -> bool:
        replaced = [*self._messages]
        replaced[index] = {**replaced[index], part.key: SENTINEL}
        try:
            return SENTINEL not in self._renderer.render(replaced, self._tools)
        except RenderError:
            return False

    def is_end_of_turn(self, start: int, end: int) -> bool:
        """Whether the characters ``start`` to ``end`` are one special token, and white space."""
        return self._special.fullmatch(self.text[start:end].strip()) is not None

    # --- borders ---

    def _start(self, index: int) -> int | None:
        for border in self._borders(self._messages, self.text, index, prompt=True):
            if self.text.startswith(border.tail, border.start):
                start = border.start + len(border.tail)
                if border.key:
                    self.notices.add("earlier_text_differs")
                return start if self._renderer.prompts else self._after_header(index, start)
        return self._start_within_prompt(index)

    def _start_within_prompt(self, index: int) -> int | None:
        """The start where only the first part of the generation prompt is in the text: the rest is an opened reasoning.

        Text that follows in the answer may begin like that rest. So a second text, in which the sentinel is the content
        of the turn, must share just as much.
        """
        replaced = [*self._messages]
        replaced[index] = {**replaced[index], "content": SENTINEL}
        try:
            other = self._renderer.render(replaced, self._tools)
            prompt = self._renderer.render(self._messages[:index], self._tools, prompt=True)
            before = self._renderer.render(self._messages[:index], self._tools)
        except RenderError:
            return None
        if SENTINEL not in other or not prompt.startswith(before):
            return None
        in_other = {border.key: border for border in self._borders(replaced, other, index, prompt=True)}
        for border in self._borders(self._messages, self.text, index, prompt=True):
            if (twin := in_other.get(border.key)) is None:
                continue
            shared = min(_common(border.tail, self.text, border.start), _common(twin.tail, other, twin.start))
            if 0 < len(border.tail) - shared < len(prompt) - len(before):  # the rest lies within the generation prompt
                self.notices.add("generation_prompt_differs")
                return border.start + shared
        return None

    def _end(self, index: int) -> int | None:
        for border in self._borders(self._messages, self.text, index + 1, prompt=False):
            if self.text.startswith(border.tail, border.start):
                return border.start + len(border.tail)
        for border in self._borders(self._messages, self.text, index + 1, prompt=False):
            shared = _common(border.tail, self.text, border.start)
            for token in self._special.finditer(border.tail):
                if token.start() <= shared and border.tail[token.start() :].strip() == token.group():
                    self.notices.add("end_of_turn_differs")
                    return border.start + token.start()
        return None

    def _borders(self, messages: list[Message], text: str, cut: int, prompt: bool) -> Iterator[_Border]:
        """Ways to find the end of ``render(messages[:cut], prompt)`` in ``text``, the rendering of ``messages``."""
        try:
            shorter = self._renderer.render(messages[:cut], self._tools, prompt)
        except RenderError:
            return
        yield _Border(0, 0, shorter)
        if cut == 0:
            return
        for key, variant in enumerate(with_inserted(messages[cut - 1], SENTINEL), 1):
            marked = [*messages]
            marked[cut - 1] = variant
            start = self._position(marked, text)
            there = self._position(marked[:cut], shorter, prompt)
            if start is not None and there is not None:
                yield _Border(key, start, shorter[there:])

    def _position(self, marked: list[Message], text: str, prompt: bool = False) -> int | None:
        """Where the sentinel of ``marked`` is, if ``marked`` renders to ``text`` with nothing but it inserted."""
        try:
            rendered = self._renderer.render(marked, self._tools, prompt)
        except RenderError:
            return None
        position = rendered.find(SENTINEL)
        return position if position >= 0 and rendered.replace(SENTINEL, "", 1) == text else None

    def _after_header(self, index: int, start: int) -> int:
        """``start``, or the end of the turn's header if the template writes no generation prompt."""
        probe = [*self._messages[:index], {"role": "assistant", "content": SENTINEL}]
        try:
            rendered = self._renderer.render(probe, self._tools)
            prompt = self._renderer.render(self._messages[:index], self._tools, prompt=True)
        except RenderError:
            return start
        header = rendered[len(prompt) : rendered.find(SENTINEL)] if rendered.startswith(prompt) else ""
        return start + len(header) if header.strip() and self.text.startswith(header, start) else start

    def _trimmed(self, start: int, end: int) -> int:
        """``end`` without white space after a special token: the model stops there."""
        written = self.text[start:end].rstrip()
        tokens = list(self._special.finditer(written))
        return start + len(written) if tokens and tokens[-1].end() == len(written) else end


def _common(tail: str, text: str, start: int) -> int:
    """How many characters of ``tail`` are at position ``start`` of ``text``."""
    pairs = zip(tail, text[start : start + len(tail)], strict=False)
    return next((count for count, (one, other) in enumerate(pairs) if one != other), min(len(tail), len(text) - start))

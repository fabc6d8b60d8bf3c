"""A conversation as the text that its template makes of it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from ds_trainer.samples.chat.bounds import MOST_STEPS, Excess, compiled
from ds_trainer.samples.chat.messages import Message
from ds_trainer.samples.chat.problems import RenderError
from ds_trainer.samples.chat.templates import has_markers, with_fixed_date
from ds_trainer.utils.errors import ConfigError

# A text that no data and no template has; templates neither trim nor escape it.
SENTINEL = "\u241fds7q\u241f"
# The fields of reasoning that templates read (transformers from 5.23 on fills them in itself).
_REASONING_ALIAS = "thinking"


class Rendered(NamedTuple):
    """Text, and the (start, end) characters of each ``{% generation %}`` block that wrote something."""

    text: str
    marked: list[tuple[int, int]]


class Renderer:
    """Applies one template.

    Attributes:
        template: its text.
        markers: whether it marks what the assistant generates.
        prompts: whether it writes a generation prompt when it is asked to.
    """

    def __init__(self, template: str, tokenizer: Any, template_kwargs: dict[str, Any], date: str) -> None:
        self.template = template
        self.markers = has_markers(template)
        self._dated, dates = with_fixed_date(template, date)
        self._variables = {**tokenizer.special_tokens_map, **template_kwargs, **dates}
        self._is_new = True  # until its first texts are rendered, which have a few words
        self._arguments_as_text = False
        self._empty_content: str | None = ""
        self.prompts = self._writes_generation_prompt()
        self.renders_tool_calls = self._find_tool_call_form()
        self._is_new = False

    def render(self, messages: Sequence[Message], tools: list[Message] | None, prompt: bool = False) -> str:
        """The text of ``messages``, with the generation prompt at the end if ``prompt``.

        Raises:
            RenderError: the template cannot.
        """
        return self.render_marked(messages, tools, prompt, markers=False).text

    def render_marked(
        self, messages: Sequence[Message], tools: list[Message] | None, prompt: bool = False, markers: bool = True
    ) -> Rendered:
        """As :meth:`render`, with the blocks that the template marks."""
        import jinja2

        blocks: list[str] = []
        marked: list[tuple[int, int]] = []
        given = [self._as_given(message) for message in messages]
        try:
            template, meter = compiled(self._dated, threading.get_ident())
            meter.begin(meter.written([given, tools, self._variables]), MOST_STEPS // (8 if self._is_new else 1))
            with template.environment.activate_tracker(blocks, marked) if markers else nullcontext():
                for block in template.generate(
                    **self._variables, messages=given, tools=tools, documents=None, add_generation_prompt=prompt
                ):
                    blocks.append(block)  # one by one: the tracker reads the list meanwhile
        except Excess as error:
            raise (ConfigError(f"{error}.") if self._is_new else error) from error
        except jinja2.TemplateError as error:
            raise RenderError(str(error) or type(error).__name__) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RenderError(f"{type(error).__name__}: {error}") from error
        except (MemoryError, RecursionError) as error:
            raise RenderError(f"it takes too much memory or is nested too deeply ({type(error).__name__})") from error
        return Rendered("".join(blocks), [(start, end) for start, end in marked if end > start])

    def _as_given(self, message: Message) -> Message:
        """The message in the form that this template reads."""
        rendered = dict(message)
        if "reasoning_content" in rendered:
            rendered = {_REASONING_ALIAS: rendered["reasoning_content"], **rendered}
        if calls := rendered.get("tool_calls"):
            if not rendered["content"]:
                rendered["content"] = self._empty_content
            if self._arguments_as_text:
                rendered["tool_calls"] = [{**call, "function": _as_text(call["function"])} for call in calls]
        return rendered

    def _writes_generation_prompt(self) -> bool:
        user = [{"role": "user", "content": "a"}]
        try:
            return self.render(user, None, prompt=True) != self.render(user, None)
        except RenderError:
            return True

    def _find_tool_call_form(self) -> bool:
        """Whether the template writes tool calls; finds out how it wants them.

        Some read arguments as a mapping and some as JSON; some write a call only if the content is null.
        """
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": SENTINEL}}}
        messages: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        for self._arguments_as_text in (False, True):
            for self._empty_content in ("", None):
                try:
                    text = self.render(messages, None)
                except RenderError:
                    continue
                # JSON within JSON (with escaped quotation marks) is a mapping's form given as text.
                if SENTINEL in text and not re.search(r"\bNone\b", text) and f'\\"{SENTINEL}' not in text:
                    return True
        self._arguments_as_text, self._empty_content = False, ""
        return False


def _as_text(function: Message) -> Message:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}

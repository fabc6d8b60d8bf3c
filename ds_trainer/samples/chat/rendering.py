"""A conversation as the text that its template makes of it."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import nullcontext
from typing import Any, NamedTuple

from ds_trainer.samples.chat.messages import Message
from ds_trainer.samples.chat.problems import RenderError
from ds_trainer.samples.chat.templates import has_markers, with_fixed_date
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.units import counted

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


# Chat templates with a bound on steps (iterations, calls, operations) and characters, counted: equal on all ranks.


# About three seconds and 300 MB. What a conversation itself has is added, often enough for templates that copy it.
MOST_STEPS = 1_000_000
_MOST_CHARACTERS = 25_000_000
_COPIES = 20
_ELEMENT = 16  # characters that take as long, and as much memory, as an element of a list
_WIDTH = re.compile(r"\d+")
_PADDED = ("center", "ljust", "rjust", "zfill", "slice", "batch", "round", "expandtabs", "truncate", "indent")
_WRITTEN_OUT = ("tojson", "string", "pprint", "urlize", "xmlattr", "urlencode", "escape", "e", "forceescape", "sum")


class Excess(RenderError):
    """The template would take time or memory without end."""


class Meter:
    """Counts what one rendering computes."""

    def begin(self, given: int, steps: int = MOST_STEPS) -> None:
        """Count anew, for a conversation of ``given`` characters and at most ``steps``."""
        self.steps = self.characters = 0
        self.most_steps, self.most = steps, _MOST_CHARACTERS + _COPIES * given

    def spend(self, characters: int = 0, steps: int = 1) -> None:
        """Count ``steps`` that make ``characters`` in all, before they are made."""
        self.steps += steps
        self.characters += characters
        if self.steps > self.most_steps:
            raise Excess(f"The chat template takes more than {counted(self.most_steps, 'step')} (loops, calls)")
        if self.characters > self.most:
            raise Excess(f"The chat template makes or reads more than {self.most:,} characters")

    def counted(self, values: Iterator[Any]) -> Iterator[Any]:
        """The same values, each a step when it comes."""
        for value in values:
            self.spend(_ELEMENT)
            yield value

    def read(self, value: Any, hashed: bool = False) -> Any:
        """``value``, after counting that it is searched, compared or sliced."""
        if isinstance(value, str | bytes):
            self.spend(len(value) // 16)
        elif not (hashed and isinstance(value, dict)):
            self.spend(self.written(value))
        return value

    def written(self, value: Any) -> int:
        """Characters of ``value`` as text, counted until there are too many."""
        total, rest = 0, [value]
        while rest and total <= self.most:
            one = rest.pop()
            if isinstance(one, dict):
                rest += [*one, *one.values()]
            elif isinstance(one, list | tuple):
                rest += one
            total += len(one) if isinstance(one, str) else _ELEMENT * (len(one) if isinstance(one, range) else 1)
        return total

    def of_call(self, name: str, value: Any, others: list[Any]) -> int:
        """At most so many characters result from the filter or the method of texts ``name``."""
        numbers = sum(abs(other) for other in others if isinstance(other, int))
        texts = [other for other in others if isinstance(other, str)]
        if name == "is":  # a test reads what it compares with
            return self.written(others)
        own = _size(value)
        if name == "replace" and len(texts) > 1:
            return own + str(value).count(texts[0]) * len(texts[1])
        if name == "join":
            separator, joined = (value, others[0]) if isinstance(value, str) and others else (texts or [""], value)
            return self.written(joined) + len(separator[0] if isinstance(separator, list) else separator) * len(
                joined if isinstance(joined, Sized) else ""
            )
        if name in ("format", "format_map", "%"):
            widths = [int(width[:12]) for width in _WIDTH.findall(value)]
            starred = numbers if re.search(r"\*|\{[^}]*\{", value) else 0
            return own + (value.count("%") + value.count("{")) * (self.written(others) + starred) + sum(widths)
        if name in _PADDED:
            lines = str(value).count("\t" if name == "expandtabs" else "\n") + 1
            return own + lines * (numbers + sum(map(len, texts)))
        if name in _WRITTEN_OUT:
            return own + self.written(value) * (1 + numbers)
        if name in ("split", "rsplit"):
            return own + _ELEMENT * (value.count(texts[0]) if texts and texts[0] else own)
        return own + (own * sum(map(len, texts)) if name == "wordwrap" else 0)

    def of_operation(self, operator: str, left: Any, right: Any) -> int:
        """At most so many characters (or digits) result from ``left operator right``."""
        if operator == "%":
            values = list(right) if isinstance(right, tuple) else [right]
            return self.of_call("%", left, values) if isinstance(left, str) else 0
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            return bits**2 // 100 if bits > 1000 else 0  # arithmetic of long numbers is slow
        sizes = [_size(value) if isinstance(value, Sized) else value for value in (left, right)]
        if not all(isinstance(size, int) for size in sizes):
            return 0
        return max(sizes[0] * sizes[1], 0) if operator == "*" else min(sizes)


def _size(value: Any) -> int:
    return len(value) * (1 if isinstance(value, str | bytes) else _ELEMENT) if isinstance(value, Sized) else 1


@functools.lru_cache(maxsize=32)
def compiled(template: str, thread: int) -> tuple[Any, Meter]:
    """The template as transformers compiles it, but counted, and its meter; for the thread of this number."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment, meter = _compile_jinja_template.__wrapped__("").environment, Meter()
    meter.begin(0)
    call, operate = environment.call, environment.call_binop

    def counted_call(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function in own:
            return function(*args)
        method = getattr(function, "__wrapped__", function)
        text = getattr(method, "__self__", None)
        named = method.__name__ if isinstance(text, str) else ""
        meter.spend(meter.of_call(named, text, [*args, *kwargs.values()]) if named else 0)
        return call(context, function, *args, **kwargs)

    def counted_operation(context: Any, operator: str, left: Any, right: Any) -> Any:
        texts = operator == "+" and type(left) is type(right) is str
        meter.spend(min(len(left), len(right)) if texts else meter.of_operation(operator, left, right))
        return operate(context, operator, left, right)

    def counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            meter.spend(meter.of_call(name, args[first], [*args[first + 1 :], *kwargs.values()]))
            made = function(*args, **kwargs)
            return meter.counted(made) if isinstance(made, Iterator) else made

        return counted

    def output(value: Any) -> Any:
        meter.spend(len(value) if type(value) is str else meter.written(value))
        return value

    environment.call, environment.call_binop, environment.finalize = counted_call, counted_operation, output
    environment.intercepted_binops = frozenset({"+", "*", "**", "%"})
    environment.filters = {name: counted_filter(name, function) for name, function in environment.filters.items()}
    environment.tests = {name: counted_filter("is", function) for name, function in environment.tests.items()}
    environment.globals.pop("lipsum", None)  # random text
    own = environment.spend, environment.read = meter.spend, meter.read
    return environment.from_string(_with_steps(environment.parse(template))), meter


def _with_steps(tree: Any) -> Any:
    """The parsed template with a count where something runs again, and where no call, filter or operation counts it."""
    from jinja2 import nodes

    def call(name: str, args: list[Any], line: int) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None).set_lineno(line)

    for node in list(tree.find_all(nodes.Concat)):
        node.nodes = [nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None).set_lineno(node.lineno)]
    for node in list(tree.find_all(nodes.Operand)):
        if not isinstance(node.expr, nodes.Const):
            hashed = nodes.Const(node.op in ("in", "notin"))
            node.expr = call("read", [node.expr, hashed], node.expr.lineno)
    for node in list(tree.find_all(nodes.Getitem)):
        if isinstance(node.arg, nodes.Slice):
            node.node = call("read", [node.node], node.lineno)
    for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        body = nodes.Scope(node.body)
        text = sum(len(part.data) for part in body.find_all(nodes.TemplateData))
        weight = 1 + sum(1 for _ in body.find_all(nodes.Node)) // 20
        counted = call("spend", [nodes.Const(text), nodes.Const(weight)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(counted).set_lineno(node.lineno))
        if getattr(node, "test", None) is not None:
            node.test = nodes.And(nodes.Not(call("spend", [], node.lineno)), node.test).set_lineno(node.lineno)
    return tree

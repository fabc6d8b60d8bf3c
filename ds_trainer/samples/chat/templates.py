"""Chat templates: the tokenizer's own, a named one, a file, or the text itself."""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

from ds_trainer.utils.errors import ConfigError, did_you_mean
from ds_trainer.utils.files import exists, read_user_file, shortened

# Plain templates for models that have none. Both render tools and reasoning in the form of Qwen and Hermes.
_TOOLS = """\
{%- if tools %}
    {%- set ns.system = (ns.system + '\\n\\n' if ns.system else '') + '# Tools\\n\\nYou may call these functions. '
        + 'Write each call as JSON, {"name": ..., "arguments": ...}, within <tool_call></tool_call>.\\n<tools>' %}
    {%- for tool in tools %}{%- set ns.system = ns.system + '\\n' + tool | tojson %}{%- endfor %}
    {%- set ns.system = ns.system + '\\n</tools>' %}
{%- endif %}
"""
_SYSTEM = """\
{%- set ns = namespace(system='') %}
{%- if messages and messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
"""
_BODY = """\
{%- macro body(message) %}
    {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
    {%- if message.content %}{{- message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first else '' }}
        {{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
"""
_CHATML = (
    _SYSTEM
    + _TOOLS
    + _BODY
    + """\
{%- if ns.system %}{{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + body(message) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
)
_PLAIN = (
    _SYSTEM
    + _TOOLS
    + _BODY
    + """\
{{- bos_token or '' }}
{%- if ns.system %}{{- ns.system + '\\n\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- 'Assistant:' + ' ' + body(message) + eos_token + '\\n' }}
    {%- else %}
        {{- message.role | capitalize + ': ' + body(message) + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}
"""
)
NAMED_TEMPLATES = {"chatml": _CHATML, "plain": _PLAIN}

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_MOST = 1_000_000
_WIDE = re.compile(r"(?:%[-+ #0]*|:\S?[<>=^]?)\d{7,}")  # widths of the two kinds of format strings
_DATE_CALL = re.compile(r"strftime_now\(\s*([^)]*?)\s*\)")


def load_template(given: str | None, tokenizer: Any) -> str:
    """The text of a chat template.

    Args:
        given: a name (``chatml``, ``plain``), a file (``.jinja``, or any path that exists), the text (it has ``{{`` or
            ``{%``), the name of one of the tokenizer's own templates, or None: the tokenizer's default one.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ConfigError: nothing of this is found.
    """
    own = getattr(tokenizer, "chat_template", None)
    if given is None:
        if isinstance(own, dict):
            own = own.get("default")
        if not own:
            raise ConfigError(
                "the tokenizer has no chat template (it belongs to a base model?); set chat_template to one of "
                f"{', '.join(NAMED_TEMPLATES)}, to a file, or to the text of a template."
            )
        return str(own)
    if "{{" in given or "{%" in given:
        return given
    if given in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[given]
    if isinstance(own, dict) and given in own:
        return str(own[given])
    if exists(given):
        return read_user_file(given, f"The chat template {given!r}", "Jinja file")
    names = [*NAMED_TEMPLATES, *(own if isinstance(own, dict) else ())]
    raise ConfigError(
        f"chat_template={shortened(given)!r} is neither a template's name ({', '.join(names)}), nor a file that "
        f"exists, nor the text of a template.{did_you_mean(given, names)}"
    )


def has_markers(template: str) -> bool:
    """Whether the template marks what the assistant generates, with ``{% generation %}``."""
    return _MARKER.search(template) is not None


def with_fixed_date(template: str, date: str) -> tuple[str, dict[str, Any]]:
    """The template with ``strftime_now`` answered for ``date`` (ISO), and the variables that this needs.

    transformers answers with the current time: the same record would give other tokens tomorrow, and on two ranks at
    midnight. Formats that are no constants are left to transformers.
    """
    arguments = _DATE_CALL.findall(template)
    if not arguments or not all(re.fullmatch(r"'[^']*'|\"[^\"]*\"", argument) for argument in arguments):
        return template, {}
    day = datetime.date.fromisoformat(date)
    dates = {argument[1:-1]: day.strftime(argument[1:-1]) for argument in arguments}
    macro = "{% macro strftime_now(format) %}{{ fixed_dates[format] }}{% endmacro %}"
    # A newline right after a block is removed (trim_blocks): one that begins the template needs another before it.
    return macro + ("\n" if template.startswith("\n") else "") + template, {"fixed_dates": dates}


def refuse_excess(template: str) -> None:
    """Refuse a template that would ask for memory or time without end: ``'a' * 10**10``, ``9**9**9``.

    Jinja computes constants when it compiles, so this looks at the constants of the text, and runs nothing. Values that
    grow in loops or from data are not found; the sandbox of transformers bounds ``range``.

    Raises:
        ConfigError: names the expression's line.
    """
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        for node in environment.parse(_GENERATION.sub("", template)).iter_child_nodes():
            _constant(node)
    except ConfigError:
        raise
    except (jinja2.TemplateError, ValueError):  # ValueError: a number of more digits than Python reads
        return  # said where it is rendered
    except RecursionError:
        raise ConfigError("The chat template is nested too deeply.") from None


def _constant(node: Any) -> Any:
    """The value of a constant expression, a number or a text, after a check of all that is in it; otherwise None."""
    from jinja2 import nodes

    values = [_constant(child) for child in node.iter_child_nodes()]
    numbers = [value for value in values if isinstance(value, int | float)]
    if isinstance(node, nodes.Const | nodes.TemplateData):
        value = node.value if isinstance(node, nodes.Const) else None
        if isinstance(value, str) and _WIDE.search(value):
            raise _excess(node)
        return value if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    if isinstance(node, nodes.List | nodes.Tuple):
        return " " * len(values)  # as long as it
    if isinstance(node, nodes.Mul):
        size = math.prod(len(value) if isinstance(value, str) else value for value in values if value is not None)
        if any(abs(number) > _MOST for number in numbers) or abs(size) > _MOST:
            raise _excess(node)
        if len(numbers) == 1 and any(isinstance(value, str) for value in values):
            return " " * int(max(size, 0))
        return size if len(numbers) == 2 else None
    if isinstance(node, nodes.Pow):
        if len(numbers) < 2 or abs(numbers[1]) > 64 or abs(numbers[0]) > _MOST or abs(_power(*numbers)) > _MOST:
            raise _excess(node)
        return _power(*numbers)
    if isinstance(node, nodes.Call | nodes.Filter) and any(abs(number) > _MOST for number in numbers):
        raise _excess(node)
    if isinstance(node, nodes.Neg | nodes.Pos):
        return values[0] if numbers else None
    if isinstance(node, nodes.Add | nodes.Sub):
        return sum(map(abs, numbers)) if len(numbers) == 2 else None
    return None


def _power(base: float, exponent: float) -> float:
    try:
        return abs(float(base)) ** float(exponent)
    except ArithmeticError:
        return math.inf


def _excess(node: Any) -> ConfigError:
    return ConfigError(f"Line {node.lineno} of the chat template makes a value of more than {_MOST:,} characters.")

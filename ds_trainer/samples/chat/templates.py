"""Chat templates: the tokenizer's own, a named one, a file, or the text itself."""

from __future__ import annotations

import datetime
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
_DATE_CALL = re.compile(r"strftime_now\(\s*([^)]*?)\s*\)")


def load_template(given: str | None, tokenizer: Any) -> str:
    """The text of a chat template.

    Args:
        given: a name (``chatml``, ``plain``), a file (``.jinja``, or any path that exists), the text (it has ``{{`` or
            ``{%``), the name of one of the tokenizer's own templates, or None: the tokenizer's default one.
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ConfigError: nothing of this is found, or its syntax is wrong.
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
        return _parsed(given, "chat_template")
    if given in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[given]
    if isinstance(own, dict) and given in own:
        return str(own[given])
    if exists(given):
        return _parsed(read_user_file(given, f"The chat template {given!r}", "Jinja file"), given)
    names = [*NAMED_TEMPLATES, *(own if isinstance(own, dict) else ())]
    raise ConfigError(
        f"chat_template={shortened(given)!r} is neither a template's name ({', '.join(names)}), nor a file that "
        f"exists, nor the text of a template.{did_you_mean(given, names)}"
    )


def _parsed(template: str, name: str) -> str:
    """``template``, whose syntax is right; ``generation`` is a tag of transformers."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (jinja2 reads it of the class)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        jinja2.Environment(extensions=[Generation, loopcontrols]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{name}, line {error.lineno}: the chat template cannot be parsed: {error.message}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{name}: the chat template is nested too deeply.") from error
    except ValueError:  # Python's limit of the digits of an integer
        raise ConfigError(f"{name}: the chat template has a number with too many digits.") from None
    return template


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

"""Reads YAML with the source line of every value, and without the surprising types of YAML 1.1.

PyYAML follows YAML 1.1, in which ``no`` is a bool, ``010`` is eight, ``12:30`` is 750 and ``1e-3`` is a string. Recipes
follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): plain ``null``/``~``,
``true``/``false``, decimal integers and floats have those types; everything else is a string. The original text is
kept as well, so that a field with a declared type can be read by that type (:mod:`ds_trainer.arguments.typed`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import shortened

_PREFIX = "tag:yaml.org,2002:"
_MOST_CHARACTERS, _MOST_VALUES = 2**19, 100_000
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with only the implicit types of YAML 1.2's core schema. Only its ``compose`` is used."""


_CoreLoader.yaml_implicit_resolvers = {}  # replaces the inherited ones

for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", rf"(?:{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))", list("-+.0123456789")),
):
    _CoreLoader.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"^{_pattern}$"), _first)


@dataclass(frozen=True)
class Located:
    """A value and its source.

    ``value`` is None, bool, int, float, str, a ``list[Located]`` or a ``dict[str, Located]``. ``where`` is
    ``file:line`` or ``command line``. ``text`` is the original text of an unquoted scalar (and of everything on the
    command line); None otherwise.
    """

    value: Any
    where: str
    text: str | None = None

    def plain(self) -> Any:
        """The value without sources, recursively."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value


def read_yaml(text: str, name: str) -> tuple[Located, list[str]]:
    """The single document in ``text``, and its problems (duplicate keys, unknown tags).

    ``name`` is the file's name for the sources. An empty document is an empty mapping.

    Raises:
        ConfigError: the text is not valid YAML.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"{name}: longer than {_MOST_CHARACTERS:,} characters, too long for a file of settings.")
    problems: list[str] = []
    try:
        node = yaml.compose(text, Loader=_CoreLoader)
        if node is None:
            return Located({}, f"{name}:1"), []
        return _Tree(name, problems).located(node, ()), problems
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {_reason(error)}") from error
    except yaml.YAMLError as error:  # a character that YAML forbids; the message names its position
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error


def read_command_line_value(text: str) -> Located:
    """One value from the command line: parsed if it is YAML (``[a, b]``, ``1e-3``), else the text as it is."""
    problems: list[str] = []
    value = None
    try:
        node = yaml.compose(text, Loader=_CoreLoader) if len(text) <= _MOST_CHARACTERS else None
        value = _Tree("", problems).located(node, ()) if node is not None else None
    except (yaml.YAMLError, RecursionError, ConfigError):
        pass  # not YAML, for example the prompt "def f(x": taken as it is
    if value is None or problems:
        return Located(text, "command line", text)
    quoted = isinstance(value.value, str) and value.text is None
    return _moved(value, None if quoted else text)


def _moved(located: Located, text: str | None) -> Located:
    """``located`` with the command line as the source of every value."""
    value = located.value
    if isinstance(value, dict):
        value = {key: _moved(entry, entry.text) for key, entry in value.items()}
    elif isinstance(value, list):
        value = [_moved(entry, entry.text) for entry in value]
    return Located(value, "command line", text)


class _Tree:
    """Turns the nodes of a document into located values; aliases become copies."""

    def __init__(self, name: str, problems: list[str]) -> None:
        self._name, self._problems = name, problems
        self._count = 0

    def located(self, node: yaml.Node, above: tuple[yaml.Node, ...]) -> Located:
        """The value of ``node``; ``above`` are the nodes that contain it.

        Raises:
            ConfigError: aliases expand to too many values.
        """
        name, problems = self._name, self._problems
        self._count += 1
        where = f"{name}:{node.start_mark.line + 1}"
        if self._count > _MOST_VALUES:
            raise ConfigError(f"{where}: more than {_MOST_VALUES:,} values; do its aliases (*name) repeat each other?")
        if any(node is ancestor for ancestor in above):
            problems.append(f"{where}: an alias refers to a value that contains it.")
            return Located(None, where)
        below = (*above, node)
        if isinstance(node, yaml.SequenceNode):
            return Located([self.located(entry, below) for entry in node.value], where)
        if isinstance(node, yaml.MappingNode):
            return Located(self._mapping(node, below), where)
        assert isinstance(node, yaml.ScalarNode)  # the third and last kind of node
        kind = node.tag.removeprefix(_PREFIX)
        if kind not in ("null", "bool", "int", "float", "str"):
            problems.append(f"{where}: the tag {node.tag!r} is not supported; write the value without it.")
            kind = "str"
        try:
            return Located(_scalar(kind, node.value), where, node.value if node.style is None else None)
        except ValueError:  # an explicit tag such as !!int on other text, or too many digits for Python
            if node.style is None and node.value.lstrip("+-")[:1].isdigit():
                return Located(node.value, where, node.value)  # text; a field for a number refuses it
            problems.append(f"{where}: {shortened(node.value, 80)!r} is not a valid {kind}.")
            return Located(None, where)

    def _mapping(self, node: yaml.MappingNode, below: tuple[yaml.Node, ...]) -> dict[str, Located]:
        name, problems = self._name, self._problems
        entries: dict[str, Located] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                problems.append(f"{name}:{line}: a key must be text, not a list or a mapping.")
                continue
            key = str(key_node.value)
            if key in lines:
                problems.append(f"{name}:{line}: duplicate key {key!r}, first given on line {lines[key]}; remove one.")
                continue
            lines[key] = line
            value = self.located(value_node, below)
            # Readers look at the key's line, also if the value is a block that begins below it.
            entries[key] = Located(value.value, f"{name}:{line}", value.text)
        return entries


def _scalar(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if kind == "int":
        return int(text.replace("_", ""), 10)
    if kind == "float":
        return parse_float(text)
    return text


def parse_float(text: str) -> float:
    """A float in YAML's notation: ``1e-3``, ``.5``, ``1_000.0``, ``.inf``, ``-.inf``, ``.nan``.

    Raises:
        ValueError: the text is not a float.
    """
    special = re.fullmatch(r"([-+]?)\.(inf|nan)", text.lower())
    return float("".join(special.groups())) if special else float(text.replace("_", ""))


def _reason(error: yaml.MarkedYAMLError) -> str:
    parts = [part for part in (error.context, error.problem) if part]
    return ", ".join(parts) + "."

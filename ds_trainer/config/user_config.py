"""Reads the user's DeepSpeed configuration, with the source line of every key.

The configuration is a JSON or hjson file, its text, or a mapping.

hjson (https://hjson.github.io) is JSON with comments, trailing commas and unquoted strings. The hjson library parses
the values; a wrapper around it records the line of each key.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping
from typing import Any

import hjson
from hjson.decoder import JSONArray, JSONObject, getNext, make_scanner, scantfnns
from hjson.scanner import linecol

from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.config.schema_values import AUTO
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_user_file
from ds_trainer.utils.secrets import is_secret, masked, without_secrets

_NAME = "deepspeed"
_LINES = "'''"
_WHOLE_BELOW = 1e10  # hjson's limit
_Scan = Callable[[str, int], tuple[Any, int]]
# Prefixes of hjson's messages, and the messages shown instead ({char} is the character at which it stopped).
_SYNTAX = {
    "Bad key name": "the text ends inside braces; is a closing brace missing?",
    "Found ':'": "a ':' without a key before it.",
    "Found whitespace": "a space in a key; is a comma missing before it, or are quotes missing?",
    "Found a punctuator": "{char} instead of a value.",
    "Found '": "a brace, bracket or comma instead of a key; is there one too many?",
    "Unterminated string": "a string without a closing quote.",
    "Invalid control character": "a string with a line break or control character; is its closing quote missing?",
    "Invalid \\X": "\\ before {char} in a string; write \\\\ for a backslash.",
    "Invalid \\u": "\\u in a string needs four hexadecimal digits.",
    "Bad multiline": "a string in ''' without an end.",
    "End of input while parsing an array": "the text ends inside a list; is a closing bracket missing?",
    "Expecting ':'": "a ':' is missing after the key.",
    "Expecting value": "the text ends where a value is expected; is a value or a bracket missing?",
    "Extra data": "text after the end of the configuration; is there a closing brace too many?",
}
# In an unquoted string, signs that it should not extend to the end of the line.
_SWALLOWED = (",", "{", "}", "[", "]", ": ", "//", "/*", "#", '"')


def read_user_config(source: Any) -> tuple[Located, list[str]]:
    """Read a DeepSpeed configuration.

    Args:
        source: path of a JSON or hjson file, text that begins with ``{``, or a mapping.

    Returns:
        The configuration with the source of every key (``ds.json:7``, or ``deepspeed.zero_optimization.stage`` in a
        mapping), and the problems after which reading continues, such as a duplicate key.

    Raises:
        ConfigError: it cannot be read.
    """
    if isinstance(source, Mapping):
        try:
            return _from_mapping(source), []
        except RecursionError:
            raise ConfigError(f"{_NAME}: the mapping is nested without end; does it contain itself?") from None
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"deepspeed={without_secrets(source)!r} must be the path of a JSON or hjson file, its text, or a mapping, "
            f"not a {type(source).__name__}."
        )
    text = os.fspath(source).removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return _parse(text, _NAME)
    if not text.strip():
        raise ConfigError(f"deepspeed={text!r} names no file; leave it out to run without a file.")
    shown = without_secrets(text)  # it may be text that should be JSON
    described = f"deepspeed={shown if shown.isprintable() else repr(shown)}"
    return _parse(read_user_file(text, described, "JSON file"), text)


def _from_mapping(source: Mapping[Any, Any], path: str = _NAME) -> Located:
    entries = {}
    for key, value in source.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{path}: the key {key!r} must be a string that is not empty.")
        entries[key] = _located(value, f"{path}.{key}")
    return Located(entries, path)


def _located(value: Any, path: str) -> Located:
    if isinstance(value, Mapping):
        return _from_mapping(value, path)
    if isinstance(value, list | tuple):
        return Located([_located(entry, path) for entry in value], path)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE_BELOW:
        value = int(value)  # as hjson reads it from a file; DeepSpeed refuses 10.0 steps
    if value is not None and not isinstance(value, bool | int | float | str):
        shown = masked(path.split(".")[-1]) if is_secret(path) else repr(value)
        raise ConfigError(
            f"{path}={shown} is of type {type(value).__name__}; write a number, string, true, false or null."
        )
    return Located(value, path)


def _parse(text: str, name: str) -> tuple[Located, list[str]]:
    decoder = _Decoder(text, name)
    try:
        root = decoder.decode(text)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(decoder.swallowed or f"{name}:{_explain(error)}") from None
    except RecursionError:
        raise ConfigError(f"{name} cannot be parsed: brackets are nested too deeply.") from None
    except IndexError:  # hjson's parser at the end of the text
        raise ConfigError(f"{decoder.unterminated(text)} without an end.") from None
    if root == {}:  # only white space and comments, without braces
        raise ConfigError(f"{name} is empty; write {{}} for a configuration without settings.")
    if not isinstance(root, Located) or not isinstance(root.value, dict):
        raise ConfigError(
            f"{name}: a DeepSpeed configuration is a mapping in braces, not {without_secrets(_plain(root))!r}."
        )
    return Located(root.value, name), decoder.problems + decoder.swallowed


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Located) else value


def _explain(error: hjson.HjsonDecodeError) -> str:
    """Line, column and what is wrong."""
    stopped = error.pos - error.msg.startswith("Invalid control")  # there the position is one too far
    message = next((message for prefix, message in _SYNTAX.items() if error.msg.startswith(prefix)), f"{error.msg}.")
    line, column = linecol(error.doc, stopped)
    return f"{line}:{column}: {message.format(char=repr(error.doc[stopped : stopped + 1]))}"


class _Decoder(hjson.HjsonDecoder):
    """hjson's decoder, which returns objects and arrays as :class:`Located`."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__()
        self._name = name
        self._line_starts = [0] + [index + 1 for index, char in enumerate(text) if char == "\n"]
        self.problems: list[str] = []
        self.swallowed: list[str] = []
        self.parse_object, self.parse_array, self.parse_tfnns = self._object, self._array, self._unquoted
        self.scan_once, self.scan_object_once = make_scanner(self)

    def _object(
        self,
        state: tuple[str, int],
        encoding: str,
        strict: bool,
        scan_once: _Scan,
        object_hook: Any,
        object_pairs_hook: Any,
        memo: Any = None,
        without_braces: bool = False,
    ) -> tuple[Located, int]:
        starts: list[int] = []
        end = state[1]

        def scan(text: str, start: int) -> tuple[Any, int]:
            nonlocal end
            char, key = getNext(text, end)  # readers look at the key's line
            starts.append(getNext(text, key + 1)[1] if char == "," else key)
            value, end = scan_once(text, start)
            return value, end

        pairs, end = JSONObject(state, encoding, strict, scan, None, list, memo, without_braces)
        entries: dict[str, Located] = {}
        for (key, value), start in zip(pairs, starts, strict=True):
            where = self._where(start)
            if not key:
                self.problems.append(f"{where}: a key must not be empty.")
            if key in entries:
                self.problems.append(
                    f"{where}: duplicate key {key!r}, first given in {entries[key].where}; remove one."
                )
            entries[key] = Located(_value(value), where)
        return Located(entries, self._where(state[1])), end

    def _array(self, state: tuple[str, int], scan_once: _Scan) -> tuple[Located, int]:
        where = self._where(state[1])
        values, end = JSONArray(state, scan_once)
        return Located([Located(_value(value), where) for value in values], where), end

    def _unquoted(self, context: Any, text: str, start: int) -> tuple[Any, int]:
        """An unquoted value: a number, true, false, null, or else a string up to the end of the line."""
        try:
            value, end = scantfnns(context, text, start)
        except hjson.HjsonDecodeError:
            raise
        except (OverflowError, ValueError):  # infinity, or more digits than Python reads
            raise hjson.HjsonDecodeError("a number that is too large", text, start) from None
        if isinstance(value, str) and any(mark in value for mark in _SWALLOWED):
            remedy = "is a comma missing?" if '"' in value or ": " in value else "put quotes around it."
            before = text[:start].rstrip().rpartition("\n")[2].rstrip(" \t:\"'")
            shown = "<SECRET>" if is_secret(before) else repr(value)
            self.swallowed.append(
                f"{self._where(start)}: the unquoted string {shown} extends to the end of the line; {remedy}"
            )
            value = AUTO  # so that nothing else is said about it
        return value, end

    def unterminated(self, text: str) -> str:
        """The comment or string in ``text`` that has no end, with its source."""
        comment = text.rfind("/*")
        if comment > text.rfind("*/"):
            return f"{self._where(comment)}: a comment /*"
        return f"{self._where(text.rfind(_LINES))}: a string in {_LINES}"

    def _where(self, position: int) -> str:
        return f"{self._name}:{bisect.bisect_right(self._line_starts, position)}"


def _value(value: Any) -> Any:
    return value.value if isinstance(value, Located) else value

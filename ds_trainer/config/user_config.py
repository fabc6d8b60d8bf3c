"""Reads the user's own DeepSpeed configuration: a JSON or hjson file, its text, or a mapping; knows every line.

hjson (https://hjson.github.io) is JSON with comments, trailing commas and unquoted words. Values come from the hjson
library's own parser; a wrapper around it notes where each key stands.
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
from ds_trainer.utils.errors import ConfigError
from ds_trainer.utils.files import read_users_text
from ds_trainer.utils.secrets import is_secret, masked, without_secrets

_NAME = "deepspeed"
_LINES = "'''"
_WHOLE_BELOW = 1e10  # hjson's limit
_Scan = Callable[[str, int], tuple[Any, int]]
# How hjson's messages begin, and what is said instead ({char} is the character that it stopped at).
_SYNTAX = {
    "Bad key name": "the text ends inside braces; is a closing brace missing?",
    "Found ':'": "a ':' without a key before it.",
    "Found whitespace": "a space in a key; is a comma missing before it, or are quotes around it?",
    "Found a punctuator": "{char} where a value is expected.",
    "Found '": "a brace, bracket or comma where a key is expected; is there one too many?",
    "Unterminated string": "a text whose closing quote is missing.",
    "Invalid control character": "a text with a line break or control character in it; is its closing quote missing?",
    "Invalid \\X": "\\ before {char} in a text; write \\\\ for a backslash.",
    "Invalid \\u": "\\u in a text needs four hexadecimal digits.",
    "Bad multiline": "a text in ''' that has no end.",
    "End of input while parsing an array": "the text ends inside a list; is a closing bracket missing?",
    "Expecting ':'": "a ':' is missing after the key.",
    "Expecting value": "the text ends where a value is expected; is a value or a bracket missing?",
    "Extra data": "text after the end of the configuration; is there a closing brace too many?",
}
# In an unquoted text, a sign that it was not meant to go to the end of the line.
_SWALLOWED = (",", "{", "}", "[", "]", ": ", "//", "/*", "#", '"')


def read_user_config(source: Any) -> tuple[Located, list[str]]:
    """Read a DeepSpeed configuration.

    Args:
        source: path of a JSON or hjson file, text that begins with ``{``, or a mapping.

    Returns:
        The configuration with the place of every key (``ds.json:7``, or ``deepspeed.zero_optimization.stage`` in a
        mapping), and problems that a reader can go on after, such as a key that is given twice.

    Raises:
        ConfigError: it cannot be read.
    """
    if isinstance(source, Mapping):
        try:
            return _from_mapping(source), []
        except RecursionError:
            raise ConfigError(f"{_NAME}: mappings nested without end; does one contain itself?") from None
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"deepspeed={without_secrets(source)!r} must be the path of a JSON or hjson file, its text, or a mapping, "
            f"not a {type(source).__name__}."
        )
    text = os.fspath(source).removeprefix("\ufeff")
    if text.lstrip().startswith("{"):
        return _parse(text, _NAME)
    if not text.strip():
        raise ConfigError(f"deepspeed={text!r} names no file; leave it out for a run without a file.")
    shown = without_secrets(text)  # it may be text that was meant as JSON
    said = f"deepspeed={shown if shown.isprintable() else repr(shown)}"
    return _parse(read_users_text(text, said, "JSON file"), text)


def _from_mapping(source: Mapping[Any, Any], path: str = _NAME) -> Located:
    entries = {}
    for key, value in source.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{path}: the key {key!r} must be a string with something in it.")
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
        value = int(value)  # as hjson reads it from a file: DeepSpeed refuses 10.0 steps
    if value is not None and not isinstance(value, bool | int | float | str):
        said = masked(path.split(".")[-1]) if is_secret(path) else repr(value)
        raise ConfigError(f"{path}={said} is a {type(value).__name__}; write a number, a text, true, false or null.")
    return Located(value, path)


def _parse(text: str, name: str) -> tuple[Located, list[str]]:
    decoder = _Decoder(text, name)
    try:
        root = decoder.decode(text)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(decoder.swallowed or f"{name}:{_in_words(error)}") from None
    except RecursionError:
        raise ConfigError(f"{name} cannot be parsed: brackets are nested too deeply.") from None
    except IndexError:  # hjson's parser at the end of the text
        raise ConfigError(f"{decoder.endless(text)} that has no end.") from None
    if root == {}:  # not even braces: white space and comments
        raise ConfigError(f"{name} is empty; write {{}} for a configuration without settings.")
    if not isinstance(root, Located) or not isinstance(root.value, dict):
        raise ConfigError(
            f"{name}: a DeepSpeed configuration is a mapping in braces, not {without_secrets(_plain(root))!r}."
        )
    return Located(root.value, name), decoder.problems + decoder.swallowed


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Located) else value


def _in_words(error: hjson.HjsonDecodeError) -> str:
    """Line, column and what is wrong there."""
    stopped = error.pos - error.msg.startswith("Invalid control")  # there it has gone on by one
    words = next((words for start, words in _SYNTAX.items() if error.msg.startswith(start)), f"{error.msg}.")
    line, column = linecol(error.doc, stopped)
    return f"{line}:{column}: {words.format(char=repr(error.doc[stopped : stopped + 1]))}"


class _Decoder(hjson.HjsonDecoder):
    """hjson's decoder, whose objects and arrays come out as :class:`Located`."""

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
            char, key = getNext(text, end)  # the key's line is where a reader looks
            starts.append(getNext(text, key + 1)[1] if char == "," else key)
            value, end = scan_once(text, start)
            return value, end

        pairs, end = JSONObject(state, encoding, strict, scan, None, list, memo, without_braces)
        entries: dict[str, Located] = {}
        for (key, value), start in zip(pairs, starts, strict=True):
            where = self._where(start)
            if not key:
                self.problems.append(f"{where}: the key '' must have something in it.")
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
        """An unquoted value: a number, true, false, null, or else text, which goes to the end of the line."""
        try:
            value, end = scantfnns(context, text, start)
        except hjson.HjsonDecodeError:
            raise
        except (OverflowError, ValueError):  # infinity, or more digits than Python reads
            raise hjson.HjsonDecodeError("a number that is too large", text, start) from None
        if isinstance(value, str) and any(mark in value for mark in _SWALLOWED):
            remedy = "is a comma missing in it?" if '"' in value or ": " in value else "put quotes around it."
            before = text[:start].rstrip().rpartition("\n")[2].rstrip(" \t:\"'")
            said = "<SECRET>" if is_secret(before) else repr(value)
            self.swallowed.append(
                f"{self._where(start)}: the unquoted text {said} goes to the end of the line; {remedy}"
            )
        return value, end

    def endless(self, text: str) -> str:
        """What begins in ``text`` and does not end, with its place."""
        comment = text.rfind("/*")
        if comment > text.rfind("*/"):
            return f"{self._where(comment)}: a comment /*"
        return f"{self._where(text.rfind(_LINES))}: a text in {_LINES}"

    def _where(self, position: int) -> str:
        return f"{self._name}:{bisect.bisect_right(self._line_starts, position)}"


def _value(value: Any) -> Any:
    return value.value if isinstance(value, Located) else value

"""Reads the user's own DeepSpeed configuration: a JSON or hjson file, its text, or a mapping; knows every line.

hjson (https://hjson.github.io) is JSON with comments, trailing commas and unquoted words. Values come from the hjson
library's own parser; a wrapper around it notes where each key stands.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hjson
from hjson.decoder import JSONArray, JSONObject, make_scanner, scantfnns

from ds_trainer.arguments.yaml_reader import Located
from ds_trainer.utils.errors import ConfigError

_NAME = "deepspeed"
_Scan = Callable[[str, int], tuple[Any, int]]


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
        return _from_mapping(source), []
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"deepspeed={source!r} must be the path of a JSON or hjson file, its text, or a mapping, not a "
            f"{type(source).__name__}."
        )
    text = os.fspath(source)
    if text.lstrip().startswith("{"):
        return _parse(text, _NAME)
    return _parse(_read(Path(text).expanduser()), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"deepspeed={path}: there is no such file (looked from {Path.cwd()}).") from None
    except IsADirectoryError:
        raise ConfigError(f"deepspeed={path} is a directory; name a JSON file in it.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"deepspeed={path} is not UTF-8 text (byte {error.start}); is it a JSON file?") from None
    except OSError as error:
        raise ConfigError(f"deepspeed={path} cannot be read: {error.strerror}.") from None


def _from_mapping(source: Mapping[Any, Any], path: str = _NAME) -> Located:
    entries = {}
    for key, value in source.items():
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {key!r} must be a string.")
        entries[key] = _located(value, f"{path}.{key}")
    return Located(entries, path)


def _located(value: Any, path: str) -> Located:
    if isinstance(value, Mapping):
        return _from_mapping(value, path)
    if isinstance(value, list | tuple):
        return Located([_located(entry, path) for entry in value], path)
    return Located(value, path)


def _parse(text: str, name: str) -> tuple[Located, list[str]]:
    if not text.strip():
        raise ConfigError(f"{name} is empty; write {{}} for a configuration without settings.")
    decoder = _Decoder(text, name)
    try:
        root = decoder.decode(text)
    except hjson.HjsonDecodeError as error:
        syntax = f"{name}:{error.lineno}:{error.colno}: {_in_words(error.msg)}."
        raise ConfigError(decoder.swallowed or syntax) from None
    except (OverflowError, IndexError, RecursionError) as error:  # hjson's parser on numbers and nesting without end
        raise ConfigError(f"{name} cannot be parsed: {error}.") from None
    if not isinstance(root, Located) or not isinstance(root.value, dict):
        raise ConfigError(f"{name}: a DeepSpeed configuration is a mapping in braces, not {_plain(root)!r}.")
    return Located(root.value, name), decoder.problems + decoder.swallowed


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Located) else value


def _in_words(message: str) -> str:
    message = message.split(": line ")[0]
    if "key name" in message:
        return f"{message}; is a quote, comma or closing brace missing before it"
    return message


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

        def scan(text: str, start: int) -> tuple[Any, int]:
            starts.append(text.rfind(":", 0, start + 1))  # the key's line is where a reader looks
            return scan_once(text, start)

        pairs, end = JSONObject(state, encoding, strict, scan, None, list, memo, without_braces)
        entries: dict[str, Located] = {}
        for (key, value), start in zip(pairs, starts, strict=True):
            where = self._where(start)
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
        value, end = scantfnns(context, text, start)
        if isinstance(value, str) and (value[-1:] in ",}]" or "//" in value or "#" in value):
            self.swallowed.append(
                f"{self._where(start)}: the unquoted text {value!r} goes to the end of the line; put quotes around it."
            )
        return value, end

    def _where(self, position: int) -> str:
        return f"{self._name}:{bisect.bisect_right(self._line_starts, position)}"


def _value(value: Any) -> Any:
    return value.value if isinstance(value, Located) else value

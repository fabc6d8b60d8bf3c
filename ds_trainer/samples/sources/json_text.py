"""``JsonText``: the values of a JSON file of any size, read as far as the next one needs it."""

from __future__ import annotations

import codecs
import json
import re
from typing import IO, Any, cast

_SPACE = re.compile(r"[ \n\r\t]*")
_PART = 2**20


class NotText(ValueError):
    """Bytes are not UTF-8."""


class RepeatedKey(ValueError):
    """A key appears twice in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(next(name for name in names if names.count(name) > 1))
    return result


DECODER = json.JSONDecoder(object_pairs_hook=_object)


class JsonText:
    """The text of a file from the value that is read next; what is before it is not held for long.

    Args:
        stream: the file, after a byte order mark.

    Attributes:
        line: the number of the line in which the rest begins.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.line = 1
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8")()
        self._text, self._position, self._ended = "", 0, False
        self._start = (1, 0)  # line of the text's first character, and how many are before it in that line
        self._bytes = 0

    def peek(self, most: int) -> str:
        """The next character that is no space; empty at the end of the file.

        Raises:
            OverflowError: there are more than ``most`` spaces.
            NotText: what follows is not UTF-8.
        """
        skipped = -self._position
        while True:
            self._move(cast("re.Match[str]", _SPACE.match(self._text, self._position)).end())
            if self._position < len(self._text) or self._ended:
                return self._text[self._position : self._position + 1]
            if (skipped := skipped + self._position) > most:
                raise OverflowError("a run of spaces")
            self._read()

    def skip(self) -> None:
        """Pass over one character, which is no line break."""
        self._position += 1

    def value(self, most: int) -> Any:
        """The next value.

        Raises:
            OverflowError: it has more than ``most`` characters.
            RecursionError: it is nested too deeply.
            ValueError: it is not valid.
        """
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._ended:
                    error.colno += self._start[1] if error.lineno == 1 else 0
                    error.lineno += self._start[0] - 1
                    raise
            else:
                if end < len(self._text) or self._ended:  # a number may go on
                    self._move(end)
                    return value
            if len(self._text) - self._position > most:
                raise OverflowError("a value")
            self._read()

    def _move(self, position: int) -> None:
        self.line += self._text.count("\n", self._position, position)
        self._position = position

    def _read(self) -> None:
        last = self._text.rfind("\n", 0, self._position)
        self._start = (self.line, self._position - last - 1 + (self._start[1] if last < 0 else 0))
        self._text, self._position = self._text[self._position :], 0
        data = self._stream.read(max(_PART, len(self._text)))
        self._ended = not data
        before = self._bytes - len(self._decoder.getstate()[0])
        try:
            self._text += self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            self.line += self._text.count("\n") + error.object.count(b"\n", 0, error.start)
            raise NotText(f"not UTF-8 text (byte {before + error.start + 1} of the file)") from None
        self._bytes += len(data)

"""Text of generated tokens while they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what decoders give for a part of a character


class TextStream:
    """Hands the text of tokens to ``write`` as soon as it cannot change any more; a ``streamer`` of transformers.

    A token may be a part of a character, and the text of a token may depend on the one before it. So the last tokens
    are decoded together with the new one, and only what is new is written. The work per token does not grow.

    Args:
        decode: token ids to text.
        write: receives pieces of text; together they are the text of all tokens.
        prompt: whether the first tokens are the prompt, which is not written.

    Attributes:
        tokens: the generated tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None], prompt: bool = True):
        self.tokens: list[int] = []
        self._decode, self._write = decode, write
        self._skip = prompt
        self._start = self._done = 0  # tokens[start:done] are written, and decoded again with the next ones

    def put(self, value: Any) -> None:
        """Take a tensor of token ids of one sequence."""
        if self._skip:
            self._skip = False
            return
        self.tokens += value.reshape(-1).tolist()
        self._emit(final=False)

    def end(self) -> None:
        """Write what was held back."""
        self._emit(final=True)

    def _emit(self, final: bool) -> None:
        before = self._decode(self.tokens[self._start : self._done])
        text = self._decode(self.tokens[self._start :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return
        self._write(text[len(before) :])
        self._start, self._done = self._done, len(self.tokens)

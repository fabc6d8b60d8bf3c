"""Text of others without the characters that control a terminal, a page or a script."""

from __future__ import annotations

import re

from ds_trainer.utils.secrets import redacted

# Controls without tab and line feed, marks that change the direction of text, separators of lines, surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str) -> str:
    r"""``text`` with escapes (``\\x1b``) in place of control characters other than tabs and line feeds."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def shown(text: str) -> str:
    """``text`` for a terminal or a log: :func:`printable`, without secrets."""
    return printable(redacted(text))


def one_line(text: str) -> str:
    """:func:`printable` with escapes also for tabs and line feeds."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")

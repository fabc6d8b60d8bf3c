"""Pieces of HTML. Texts are escaped here, unless a parameter says that it is HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def section(title: str, body: str) -> str:
    """A section; ``body`` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def card(title: str, big: str, lines: Sequence[str]) -> str:
    """A card with one figure (``big``, HTML) and lines below it."""
    small = "".join(f'<p class="soft small">{escape(line)}</p>' for line in lines)
    return f'<div class="card"><h2>{escape(title)}</h2><div class="big">{big}</div>{small}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls within itself on a narrow screen."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def rows_table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    return f'<div class="scroll"><table>{body}</table></div>'


def shown(name: str) -> str:
    """The name of a logged value as text."""
    return name.replace("_", " ")

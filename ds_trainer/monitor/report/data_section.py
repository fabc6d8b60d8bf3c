"""The data card of a report: counts, lengths and colored samples.

``data_card.json`` in the output directory has what prepared the data. All keys are optional::

    {"figures": {"samples": 12000, "trained share": "61 %"},
     "sources": [{"name": "chats.jsonl", "samples": 8000, "tokens": 3100000, "truncated": 12}],
     "lengths": {"edges": [0, 128, 256, 512], "counts": [10, 200, 31]},
     "samples": [{"source": "chats.jsonl:3", "pieces": [{"text": "<|user|>Hi", "trained": false}, ...]}]}

A piece with ``"new_row": true`` begins another sample within a packed row.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from ds_trainer.monitor.report.charts import histogram
from ds_trainer.monitor.report.html import rows_table, section, table
from ds_trainer.monitor.report.run_files import is_number

_MOST_SAMPLES, _MOST_CHARACTERS, _MOST_SOURCES = 20, 6000, 200


def data_section(data: Mapping[str, Any] | None) -> str:
    """The section; empty without data."""
    if not data:
        return ""
    parts = []
    figures, sources, lengths = data.get("figures"), data.get("sources"), data.get("lengths")
    if isinstance(figures, Mapping):
        parts.append(rows_table((str(name), _number(value)) for name, value in figures.items()))
    sources = [one for one in sources if isinstance(one, Mapping)] if isinstance(sources, list) else []
    if sources:
        names = list(dict.fromkeys(name for source in sources for name in source))
        rows = [[_number(source.get(name, "")) for name in names] for source in sources[:_MOST_SOURCES]]
        parts.append(f"<h3>Sources</h3>{table(names, rows)}")
    if isinstance(lengths, Mapping):
        bars = histogram("Tokens of a sample", _numbers(lengths.get("edges")), _numbers(lengths.get("counts")))
        parts.append(f'<div class="charts">{bars}</div>')
    samples = data.get("samples")
    if isinstance(samples, list) and samples:
        parts.append('<h3>Samples</h3><p class="small"><span class="trained">trained on</span> '
                     '<span class="masked">masked</span></p>')  # fmt: skip
        parts += [_sample(sample) for sample in samples[:_MOST_SAMPLES] if isinstance(sample, Mapping)]
    return section("Data", "".join(parts)) if parts else ""


def _sample(sample: Mapping[str, Any]) -> str:
    pieces, room = [], _MOST_CHARACTERS
    given = sample.get("pieces")
    for piece in given if isinstance(given, list) else ():
        if not isinstance(piece, Mapping):
            continue
        text = str(piece.get("text", ""))[:room]
        room -= len(text)
        kind = "trained" if piece.get("trained") else "masked"
        pieces.append(f'<span class="{kind}{" newrow" if piece.get("new_row") else ""}">{escape(text)}</span>')
        if room <= 0:
            pieces.append(" ...")
            break
    source = escape(str(sample.get("source", "")))
    return f'<div class="soft small">{source}</div><div class="sample">{"".join(pieces)}</div>'


def _numbers(values: Any) -> list[float]:
    """``values`` if they are numbers, else none."""
    return values if isinstance(values, list) and all(map(is_number, values)) else []


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

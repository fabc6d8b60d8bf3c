"""The page of ``ds-trainer data show``: samples as they are trained on, and figures of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.chat.display import sample_text, token_lines
from ds_trainer.data.chat.encoder import Encoder, Sample
from ds_trainer.data.chat.figures import Figures
from ds_trainer.data.chat.tokens import IGNORED
from ds_trainer.data.order import epoch_order
from ds_trainer.data.packing.rows import PackedRows, packed_rows
from ds_trainer.data.sources.record import Record


@dataclass(frozen=True)
class PageOptions:
    """What is shown.

    Attributes:
        samples: number of samples of each source.
        tokens: token by token, one line each.
        color: for a terminal.
        packing: rows of ``row_length`` tokens in the order of the first epoch with ``seed``; None: no packing.
    """

    samples: int = 3
    tokens: bool = False
    color: bool = False
    packing: PackingStrategy | None = None
    row_length: int = 0
    seed: int = 42


class _Shown(NamedTuple):
    """A sample that is shown: its number among all, and where its record was read."""

    number: int
    where: str
    sample: Sample


def write_page(
    sources: Iterable[tuple[str, Iterable[Record]]],
    encoder: Encoder,
    options: PageOptions,
    write: Callable[[str], None],
) -> dict[str, Figures]:
    """Encode all records, write samples and figures, and return the figures of each source.

    Args:
        sources: name and records of each.
        encoder: of the recipe.
        options: what is shown.
        write: gets each line.
    """
    figures: dict[str, Figures] = {}
    shown: dict[str, list[_Shown]] = {}
    before = 0
    for name, records in sources:
        found = figures[name] = Figures()
        chosen = shown[name] = []
        for record in records:
            for sample in found.add(encoder, record):
                if len(chosen) < options.samples:
                    chosen.append(_Shown(before + len(chosen), record.source, sample))
        before += len(found.lengths)
    rows = _rows([length for found in figures.values() for length in found.lengths], options)
    places = {} if rows is None else _places(rows, {one.number for chosen in shown.values() for one in chosen})
    for name, chosen in shown.items():
        for line in (line for one in chosen for line in _sample_lines(name, one, encoder, options, places)):
            write(line)
    for name, found in figures.items():
        write(f"=== {name} ===")
        for line in found.lines():
            write(line)
        write("")
    if rows is not None:
        write(f"packed: {rows.summary.text()}")
    return figures


def _sample_lines(
    name: str, one: _Shown, encoder: Encoder, options: PageOptions, places: dict[int, str]
) -> Iterator[str]:
    for key in one.sample:
        if not key.endswith("input_ids"):
            continue
        side = key.removesuffix("input_ids")
        ids, labels = one.sample[key], one.sample[f"{side}labels"]
        trained = int(np.count_nonzero(labels[1:] != IGNORED))
        described = [
            f"{name}, {one.where}" + (f", {side.removesuffix('_')}" if side else ""),
            f"{len(ids):,} tokens, {trained:,} trained on ({trained / len(ids):.0%})",
        ]
        described += [places[one.number]] if one.number in places else []
        yield f"--- {'; '.join(described)} ---"
        if options.tokens:
            yield from token_lines(encoder.tokenizer, ids, labels, options.color)
        else:
            yield sample_text(encoder.tokenizer, ids, labels, options.color)
        yield ""


def _rows(lengths: list[int], options: PageOptions) -> PackedRows | None:
    """The rows of all samples, as training packs them where none is held out and sources have no weights."""
    if options.packing is None or not lengths:
        return None
    order = epoch_order(len(lengths), options.seed, 0, shuffle=True)
    return packed_rows(lengths, options.row_length, options.packing, order, options.seed)


def _places(rows: PackedRows, wanted: set[int]) -> dict[int, str]:
    """Where samples are packed: the row, the tokens in it, and the other samples of the row."""
    places: dict[int, str] = {}
    for row in range(len(rows)):
        position = 0
        pieces = list(rows.row(row))
        for sample, start, length in pieces:
            if sample in wanted and start == 0:
                others = [str(other) for other, _, _ in pieces if other != sample]
                beside = f" with samples {', '.join(others[:4])}{', ...' if len(others) > 4 else ''}" if others else ""
                places[sample] = f"row {row}, tokens {position} to {position + length - 1}{beside}"
            position += length
    return places

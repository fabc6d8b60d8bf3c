"""The page of ``ds-trainer data show``: samples as they are trained on, and figures of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_trainer.arguments.enums import PackingStrategy
from ds_trainer.data.order import epoch_order
from ds_trainer.data.packing.rows import PackedRows, packed_rows
from ds_trainer.samples.chat.display import sample_text, token_lines
from ds_trainer.samples.chat.encoder import Encoder, Sample
from ds_trainer.samples.chat.figures import Figures
from ds_trainer.samples.chat.tokens import IGNORED
from ds_trainer.samples.sources.mixture import Mixture
from ds_trainer.samples.sources.record import Record


@dataclass(frozen=True)
class PageOptions:
    """What is shown.

    Attributes:
        samples: number of samples of each source.
        tokens: token by token, one line each.
        color: for a terminal.
        packing: rows of ``row_length`` tokens in the order of the first epoch with ``seed``; None: no packing.
        trained: how many of the sources are trained on, the first ones; None: all.
        weights: of these; None: all samples of all.
        epochs: in which samples of weighted sources are counted.
    """

    samples: int = 3
    tokens: bool = False
    color: bool = False
    packing: PackingStrategy | None = None
    row_length: int = 0
    seed: int = 42
    trained: int | None = None
    weights: tuple[float, ...] | None = None
    epochs: float = 1.0


class _Shown(NamedTuple):
    """A sample that is shown: its position in its source, and where its record was read."""

    position: int
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
    for name, records in sources:
        found = figures[name] = Figures()
        chosen = shown[name] = []
        for record in records:
            for sample in found.add(encoder, record):
                if len(chosen) < options.samples:
                    chosen.append(_Shown(len(chosen), record.source, sample))
    epoch = _epoch(figures, options)
    rows = None if epoch is None else _rows(epoch, options)
    places = {} if rows is None or epoch is None else _places(rows, epoch, options.samples)
    for number, (name, chosen) in enumerate(shown.items()):
        for one in chosen:
            for line in _sample_lines(name, one, encoder, options, places.get((number, one.position))):
                write(line)
    for name, found in figures.items():
        write(f"=== {name} ===")
        for line in found.lines():
            write(line)
        write("")
    for line in epoch.describe(options.epochs) if epoch is not None and epoch.weighted else ():
        write(line)
    if rows is not None:
        write(f"packed: {rows.summary.text()}")
    return figures


def _sample_lines(name: str, one: _Shown, encoder: Encoder, options: PageOptions, place: str | None) -> Iterator[str]:
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
        described += [] if place is None else [place]
        yield f"--- {'; '.join(described)} ---"
        if options.tokens:
            yield from token_lines(encoder.tokenizer, ids, labels, options.color)
        else:
            yield sample_text(encoder.tokenizer, ids, labels, options.color)
        yield ""


def _epoch(figures: dict[str, Figures], options: PageOptions) -> Mixture | None:
    """The lengths of the samples of an epoch; None if a source that is trained on has none."""
    trained = dict(list(figures.items())[: options.trained])
    lengths = [found.lengths for found in trained.values()]
    if not lengths or not all(lengths):
        return None
    return Mixture(
        lengths, options.weights, names=list(trained), seed=options.seed, new_samples=options.packing is None
    )


def _rows(epoch: Mixture, options: PageOptions) -> PackedRows | None:
    """The rows as training packs them."""
    if options.packing is None:
        return None
    lengths = [epoch[index] for index in range(len(epoch))]
    order = epoch_order(len(lengths), options.seed, 0, shuffle=True)
    return packed_rows(lengths, options.row_length, options.packing, order, options.seed)


def _places(rows: PackedRows, epoch: Mixture, samples: int) -> dict[tuple[int, int], str]:
    """Where the first ``samples`` of each source are packed first: the row, the tokens in it, what else is in it."""
    places: dict[tuple[int, int], str] = {}
    for row in range(len(rows)):
        position = 0
        pieces = list(rows.row(row))
        for index, start, length in pieces:
            source, number = epoch.locate(index)
            if number < samples and start == 0 and (source, number) not in places:
                others = [_name(epoch, other) for other, _, _ in pieces if other != index]
                beside = f" with {', '.join(others[:4])}{', ...' if len(others) > 4 else ''}" if others else ""
                places[source, number] = f"row {row}, tokens {position} to {position + length - 1}{beside}"
            position += length
    return places


def _name(epoch: Mixture, index: int) -> str:
    source, number = epoch.locate(index)
    return f"sample {number} of {epoch.names[source]}"

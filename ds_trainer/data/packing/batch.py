"""The batch of packed rows: how the model is told where one sample ends and the next begins.

The convention is that of transformers: ``position_ids`` restart at every sample, and there is no ``attention_mask``.
Causal models of transformers, flash attention and :func:`ds_trainer.attention` keep such samples apart. Room at the end
of a row is another sample, or several, of padding tokens without targets. What some models need in addition is in
:class:`PackedFormat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ds_trainer.data.packing.datasets import Piece, Row
from ds_trainer.data.packing.token_counts import MASK, TOKENS
from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.parallel.deferred_mask import DocumentMask, pairs_of
from ds_trainer.parallel.document_attention import Documents
from ds_trainer.utils.errors import ConfigError

POSITIONS = "position_ids"
_PART = 32  # tokens of a part of the room, if no sample of the row is longer
Document = dict[str, torch.Tensor]  # the tokens of a sample in a row: a tensor [tokens, ...] for each key


class PairMask(Enum):
    """A mask ``[rows, 1, tokens, tokens]`` for models that do not find samples in ``position_ids``."""

    NONE = "none"
    DEFERRED = "deferred"  # the boolean one, made when something reads it (sdpa)
    BOOLEAN = "boolean"  # True: may attend (sdpa in compiled code)
    ADDITIVE = "additive"  # 0: may attend; else the lowest float32 number (eager)


@dataclass(frozen=True)
class PackedFormat:
    """What a model needs in a batch of packed rows.

    Attributes:
        label_names: keys that may hold labels, one integer for each token.
        shifts_labels: the model compares its output at ``t`` with label ``t + 1``: the first token of a sample is then
            no target, because the last one of the previous sample would predict it.
        first_position: the position of the first token of a sample (RoBERTa counts from ``pad_token_id + 1``).
        pad_token_id: the token in the room at the end of a row.
        pair_mask: whether the batch has a mask of all pairs of tokens.
        flash: whether it has the borders of samples for flash kernels (``cu_seq_lens_q`` ...).
        numbers: whether it has the number of the sample of each token (``seq_idx``), for recurrent layers.
        takes_mask: whether the model takes an ``attention_mask`` for a sample alone.
    """

    label_names: tuple[str, ...] = ("labels",)
    shifts_labels: bool = True
    first_position: int = 0
    pad_token_id: int = 0
    pair_mask: PairMask = PairMask.NONE
    flash: bool = False
    numbers: bool = False
    takes_mask: bool = True

    # -- from samples to rows -----------------------------------------------------------------------------------------

    def assemble(self, rows: Sequence[Sequence[Document]], length: int) -> dict[str, Any]:
        """The batch of ``rows``, each a list of documents with at most ``length`` tokens together."""
        keys = list(rows[0][0])
        batch: dict[str, Any] = {}
        for key in keys:
            fill = IGNORED if key in self.label_names else self.pad_token_id if key == TOKENS else 0
            batch[key] = torch.stack([_filled([document[key] for document in row], length, fill) for row in rows])
        lengths = [_with_room([len(document[TOKENS]) for document in row], length) for row in rows]
        batch[POSITIONS] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        if self.shifts_labels:
            for name in self.label_names:
                if name in batch:
                    batch[name][batch[POSITIONS] == 0] = IGNORED
        if self.numbers:
            batch["seq_idx"] = ((batch[POSITIONS] == 0).cumsum(1) - 1).to(torch.int32)
        if self.pair_mask is not PairMask.NONE:
            batch[MASK] = self._pairs(Documents.of(batch[POSITIONS]))
        if self.flash or self.numbers:
            batch.update(_borders([n for row in lengths for n in row]))
        batch[POSITIONS] += self.first_position
        return batch

    def _pairs(self, documents: Documents) -> torch.Tensor:
        if self.pair_mask is PairMask.DEFERRED:
            return DocumentMask(documents)
        same = pairs_of(documents, torch.device("cpu"))
        if self.pair_mask is PairMask.BOOLEAN:
            return same
        return torch.zeros(same.shape).masked_fill(~same, torch.finfo(torch.float32).min)

    # -- from rows to samples -----------------------------------------------------------------------------------------

    def documents(self, batch: Mapping[str, Any]) -> list[Document]:
        """The samples in the rows of ``batch``, in order, without padding."""
        return [document for index in range(len(batch[POSITIONS])) for document in self._in_row(batch, index)]

    def _in_row(self, batch: Mapping[str, Any], index: int) -> Iterator[Document]:
        positions = batch[POSITIONS]
        keys = [key for key, value in batch.items() if self._per_token(key, value, positions)]
        row = positions[index]
        starts = (row == self.first_position).nonzero().flatten().tolist()
        text = self._end_of_text(batch, index)
        for start, end in pairwise([*starts, len(row)]):
            if start == 0 or start < text:
                yield {key: batch[key][index, start:end] for key in keys}

    def beginning(self, batch: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """A batch of rows of ``tokens`` with the first samples of each row of ``batch``: of each at most a quarter of a
        row, so that there are four of them if ``batch`` has four. Shorter rows stay as they are.
        """
        if batch[TOKENS].shape[1] <= tokens:
            return dict(batch)
        rows: list[list[Document]] = []
        for index in range(len(batch[TOKENS])):
            kept: list[Document] = []
            room = tokens
            for document in self._in_row(batch, index):
                size = min(len(document[TOKENS]), tokens // 4, room)
                kept.append({key: value[:size] for key, value in document.items()})
                room -= size
                if not room:
                    break
            rows.append(kept)
        return self.assemble([row for row in rows if row], tokens)

    def _per_token(self, key: str, value: Any, positions: torch.Tensor) -> bool:
        own = (POSITIONS, "seq_idx", MASK)
        return key not in own and isinstance(value, torch.Tensor) and value.shape[:2] == positions.shape

    def text_tokens(self, batch: Mapping[str, Any]) -> int:
        """The tokens of ``batch`` without the room at the ends of its rows."""
        return sum(self.ends_of_text(batch))

    def ends_of_text(self, batch: Mapping[str, Any]) -> list[int]:
        """The tokens of each row of ``batch`` without the room at its end; nothing if it has no packed rows."""
        if not isinstance(batch, Mapping) or not {TOKENS, POSITIONS} <= batch.keys():
            return []
        return [self._end_of_text(batch, index) for index in range(len(batch[TOKENS]))]

    def _end_of_text(self, batch: Mapping[str, Any], index: int) -> int:
        """Where the room at the end of a row begins: padding tokens without targets."""
        labels = [batch[name][index] for name in self.label_names if name in batch]
        filled = batch[TOKENS][index] != self.pad_token_id
        for label in labels:
            filled = filled | (label != IGNORED)
        begins = batch[POSITIONS][index] == self.first_position
        if labels and bool(filled.any()):
            begins[: int(filled.nonzero().max()) + 1] = False  # a sample may end with such tokens, too
            return int(begins.nonzero()[0]) if bool(begins.any()) else len(filled)
        return len(filled)

    def alone(self, document: Document) -> dict[str, Any]:
        """The batch of one sample as it is trained on without packing."""
        batch = {key: value[None] for key, value in document.items()}
        return {**batch, MASK: torch.ones_like(batch[TOKENS])} if self.takes_mask else batch


def _filled(parts: list[torch.Tensor], length: int, fill: int) -> torch.Tensor:
    joined = torch.cat(parts)
    room = length - len(joined)
    return F.pad(joined, (0, 0) * (joined.dim() - 1) + (0, room), value=fill) if room else joined


def _with_room(lengths: list[int], length: int) -> list[int]:
    """The lengths of the samples and of the parts of the room, whose positions do not exceed those of the samples: a
    row may be longer than the table of positions of the model.
    """
    room, part = length - sum(lengths), max([*lengths, _PART])
    return [*lengths, *[part] * (room // part), *([room % part] if room % part else [])]


def _borders(lengths: list[int]) -> dict[str, Any]:
    """The borders of samples in all rows, one after the other, as flash kernels take them."""
    ends = torch.cumsum(torch.tensor([0, *lengths]), 0).to(torch.int32)
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


class PackingCollator:
    """Makes a batch of rows: each sample goes through ``collate`` alone, then the samples of a row are concatenated.

    Args:
        collate: returns a batch for a list of one sample: tensors ``[1, tokens, ...]``. Padding that its
            ``attention_mask`` excludes is removed.
        max_length: tokens of a row.
        format: what the model needs.
        copies_tokens: samples without labels get a copy of their tokens as labels.
        cp: context-parallel ranks; their work is balanced by the order of the samples in a row.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        max_length: int,
        format: PackedFormat,
        copies_tokens: bool = False,
        cp: int = 1,
    ) -> None:
        self.collate = collate
        self.max_length = max_length
        self.format = format
        self._copies_tokens = copies_tokens
        self._cp = cp

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        """The batch of ``rows``.

        Raises:
            ConfigError: a sample has something that is not one value per token.
        """
        return self.format.assemble([self._documents(row) for row in rows], self.max_length)

    def _documents(self, row: Row) -> list[Document]:
        documents = [self._document(piece) for piece in row]
        if self._cp == 1:
            return documents
        lengths = [len(document[TOKENS]) for document in documents]
        order = balanced_order(lengths, self.max_length, self._cp, causal=self.format.shifts_labels)
        return [documents[index] for index in order]

    def _document(self, piece: Piece) -> Document:
        batch = self.collate([piece.sample])
        if not isinstance(batch, Mapping) or not isinstance(batch.get(TOKENS), torch.Tensor):
            raise ConfigError(
                f"packing=True needs batches with a tensor '{TOKENS}', but the data_collator returned "
                f"{', '.join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__}."
            )
        kept = self._kept(batch, piece)
        document = {}
        for key, value in batch.items():
            if key == MASK or value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.shape[:2] != batch[TOKENS].shape:
                raise ConfigError(_not_per_token(key, value, batch[TOKENS]))
            if key in (POSITIONS, "seq_idx"):
                raise ConfigError(
                    f"packing=True: the samples have '{key}', so they seem to be packed already. Remove the column, or "
                    "set packing=False."
                )
            document[key] = value[0][kept][piece.start : piece.start + piece.length]
        if self._copies_tokens and not any(name in document for name in self.format.label_names):
            document[self.format.label_names[0]] = document[TOKENS].clone()
        for name in self.format.label_names:
            if name in document and document[name].is_floating_point():
                raise ConfigError(f"packing=True needs integer labels, one for each token, but '{name}' are floats.")
        return document

    def _kept(self, batch: Mapping[str, Any], piece: Piece) -> torch.Tensor | slice:
        """The tokens that are not padding.

        Raises:
            ConfigError: their number is not that for which the row was made.
        """
        mask = batch.get(MASK)
        has_padding = isinstance(mask, torch.Tensor) and mask.shape == batch[TOKENS].shape and not bool(mask.all())
        kept = mask[0].bool() if has_padding and mask is not None else slice(None)
        tokens = int(mask.sum()) if has_padding and mask is not None else int(batch[TOKENS].shape[1])
        if piece.whole is not None and tokens != piece.whole:
            raise ConfigError(
                f"packing=True: a sample had {piece.whole} tokens when the rows were made, and has {tokens} now. "
                "Samples must have the same number of tokens each time; padding must be 0 in an attention_mask."
            )
        return kept


def _not_per_token(key: str, value: Any, tokens: torch.Tensor) -> str:
    what = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    return (
        f"packing=True packs text only, with one value for each token, but '{key}' of a sample with "
        f"{tokens.shape[1]} tokens is {what}. Remove it from the dataset, or set packing=False."
    )


_TRIED = 96


def balanced_order(lengths: Sequence[int], row: int, cp: int, causal: bool = True) -> list[int]:
    """Indices of the documents in the order that gives all context-parallel ranks about the same attention work.

    In zig-zag order (:class:`ds_trainer.parallel.sequence_plan.SequencePlan`) rank ``i`` of ``cp`` holds the chunks
    ``i`` and ``2 * cp - 1 - i`` of a row. One long document is balanced by that, and so are many short ones. A document
    as long as a chunk is not: its work grows with the square of its length, and one rank may have most of it. The
    documents of a row can stand in any order, so some orders are tried, and the one whose busiest rank has least to do
    is taken. It depends on the arguments alone.

    Args:
        lengths: tokens of each document; room at the end of the row is padding, which attends to itself.
        row: tokens of the row.
        cp: context-parallel ranks.
        causal: whether tokens attend to earlier tokens only.
    """
    count = len(lengths)
    best = np.arange(count)
    if cp == 1 or count < 2:
        return best.tolist()
    sizes, draws = np.asarray(lengths, dtype=np.int64), np.random.default_rng(0)
    least = busiest_rank(sizes, row, cp, causal)
    documents = np.append(sizes, row - sizes.sum()).astype(np.float64)
    bound = 1.02 * float(_pairs(documents, documents, causal).sum()) / cp  # of the mean
    for trial in range(_TRIED):
        if least <= bound:
            break
        if trial < _TRIED // 3:
            order = draws.permutation(count)
        else:  # improve the best order by moving one document
            order = best.copy()
            source, target = draws.integers(count, size=2)
            order[source], order[target] = order[target], order[source]
        work = busiest_rank(sizes[order], row, cp, causal)
        if work < least:
            best, least = order, work
    return best.tolist()


def busiest_rank(lengths: np.ndarray, row: int, cp: int, causal: bool = True) -> float:
    """Pairs of tokens that the rank with most of them computes, if the documents stand in the order of ``lengths``."""
    sizes = np.append(lengths, row - lengths.sum()).astype(np.float64)
    ends = sizes.cumsum()
    done = np.append(0.0, _pairs(sizes, sizes, causal).cumsum())
    borders = np.arange(2 * cp + 1) * (row / (2 * cp))
    document = np.minimum(np.searchsorted(ends, borders, side="right"), len(sizes) - 1)
    inside = borders - (ends - sizes)[document]
    before = done[document] + _pairs(inside, sizes[document], causal)
    of_chunks = np.diff(before)
    return float((of_chunks[:cp] + of_chunks[::-1][:cp]).max())


def _pairs(queries: np.ndarray, keys: np.ndarray, causal: bool) -> np.ndarray:
    """Pairs of the first ``queries`` tokens of a document of ``keys`` tokens with the tokens that they attend to."""
    result: np.ndarray = queries * (queries + 1) / 2 if causal else queries * keys
    return result

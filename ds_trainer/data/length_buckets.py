"""``LengthBuckets``: pads micro-batches of token sequences to one of a few lengths that are chosen from the data.

Kernels that are compiled, planned or captured for a shape are then made a few times instead of for every new length.
Padding has no effect on a loss: no token attends to it, and it has no target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ds_trainer.data.lengths import stored_lengths
from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.data.source_ids import SOURCE_IDS
from ds_trainer.data.stream import is_stream
from ds_trainer.utils.seeds import random_state, restore_random_state
from ds_trainer.utils.units import counted

_READ = 256  # samples whose lengths are read, if the dataset does not know the lengths of all
_BATCHES = 1024  # drawn from the lengths
_STEPS = 64  # the longest sample has at least as many units, of which a bucket is a multiple


@dataclass(frozen=True)
class LengthBuckets:
    """A collator that pads the batches of another one.

    Padded are the tensors with one entry per token of a batch with ``input_ids`` and ``attention_mask``, both
    ``[B, S]``, on the side on which they are padded already. A batch with a tensor of ``S`` entries that is not known
    stays as it is, and so does one that is longer than all buckets.

    Attributes:
        collate: makes a batch of samples.
        lengths: the buckets, in ascending order.
        pad_token_id: fills ``input_ids``; None: no token does, and batches without a target per token stay as they are.
        label_names: keys of labels, which are padded with -100.
        padding: share of the padding in the batches of a run, with buckets and without, as :meth:`choose` drew them.
        samples: how many samples the buckets were chosen from.
    """

    collate: Callable[[list[Any]], Any]
    lengths: Sequence[int]
    pad_token_id: int | None
    label_names: Collection[str] = ("labels",)
    padding: Sequence[float] = (0.0, 0.0)
    samples: int = 0

    @classmethod
    def choose(
        cls,
        collate: Callable[[list[Any]], Any],
        dataset: Any,
        micro_batch: int,
        count: int,
        *,
        in_order: bool = False,
        **options: Any,
    ) -> LengthBuckets | None:
        """At most ``count`` lengths for the batches of ``dataset``, with the least padding; the same on all ranks.

        Reads up to 256 samples, evenly over the dataset, unless it knows their lengths. ``in_order``: the samples of a
        batch are of about the same length. ``options``: further attributes.

        Returns:
            The collator; None if the batches are not token sequences, have at most ``count`` lengths anyway, or come
            from a stream, of which no sample can be read before its turn.
        """
        if is_stream(dataset) or not len(dataset):  # the latter is refused later
            return None
        known = stored_lengths(dataset)
        if known is None or len(known) != len(dataset):
            known = _read_lengths(dataset, collate)
        if not len(known):
            return None
        longest = int(known.max())
        unit = max(8, 2 ** int(np.log2(max(longest / _STEPS, 1))))
        if len(np.unique(known)) <= count:
            return None
        draw = np.random.Generator(np.random.PCG64(0))
        batches = draw.choice(known.astype(np.int64), (_BATCHES, micro_batch))
        if in_order:
            batches = np.sort(batches, axis=None).reshape(batches.shape)
        maxima = batches.max(1)
        lengths = _best_buckets(np.append(maxima, longest), unit, count)
        padded = np.asarray(lengths)[np.searchsorted(lengths, maxima)]
        shares = [1 - batches.sum() / (micro_batch * rows.sum()) for rows in (padded, maxima)]
        return cls(collate, lengths, padding=shares, samples=len(known), **options)

    def lengths_text(self) -> str:
        """One line for the header."""
        shown = ", ".join(f"{length:,}" for length in self.lengths)
        with_buckets, without = (f"{100 * share:.3g} %" for share in self.padding)
        samples = counted(self.samples, "sample")
        return f"padded to {shown} tokens: {with_buckets} padding, {without} without (estimated from {samples})"

    def __call__(self, samples: list[Any]) -> Any:
        """The batch of ``samples``, padded to the first bucket in which it fits."""
        batch = self.collate(samples)
        rows, length = _token_shape(batch)
        bucket = next((one for one in self.lengths if one >= length), length)
        keys = [] if bucket == length or not rows else self._sequences(batch, rows, length)
        if not keys:
            return batch
        padding, fills = bucket - length, self._fills()
        left = bool((batch["attention_mask"][:, 0] == 0).any() and (batch["attention_mask"][:, -1] != 0).all())
        for key in keys:
            value, fill = batch[key], fills[key]
            if fill is None:  # positions repeat the last one: a table of them may end there
                edge = value[:, :1] if left else value[:, -1:]
                parts = [edge.expand(-1, padding), value]
                batch[key] = torch.cat(parts if left else parts[::-1], dim=1)
            else:
                batch[key] = F.pad(value, (padding, 0) if left else (0, padding), value=fill)
        return batch

    def _fills(self) -> dict[str, int | None]:
        """What pads each key; None: its last value."""
        fills: dict[str, int | None] = dict.fromkeys((*self.label_names, "shift_labels"), IGNORED)
        fills |= dict.fromkeys(("attention_mask", "token_type_ids", SOURCE_IDS), 0)
        return fills | {"input_ids": self.pad_token_id or 0, "special_tokens_mask": 1, "position_ids": None}

    def _sequences(self, batch: Any, rows: int, length: int) -> list[str]:
        """The keys to pad; none if it is unknown how, or if the padding could be mistaken for text."""
        keys = [key for key, value in batch.items() if isinstance(value, torch.Tensor) and length in value.shape[1:]]
        fills = self._fills()
        for key in keys:
            value = batch[key]
            if key not in fills or list(value.shape) != [rows, length] or value.is_floating_point():
                return []
        return keys if self.pad_token_id is not None or not set(self.label_names).isdisjoint(keys) else []


def _token_shape(batch: Any) -> tuple[int, int]:
    """Rows and positions of a batch with a mask; zeros for any other."""
    if not isinstance(batch, MutableMapping):
        return 0, 0
    tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not (isinstance(tokens, torch.Tensor) and isinstance(mask, torch.Tensor) and tokens.dim() == 2):
        return 0, 0
    return (int(tokens.shape[0]), int(tokens.shape[1])) if tokens.shape == mask.shape else (0, 0)


def _read_lengths(dataset: Any, collate: Callable[[list[Any]], Any]) -> np.ndarray:
    """Lengths of some samples as ``collate`` makes them; empty if these are no tokens with a mask."""
    random, lengths = random_state(), []
    try:
        for index in np.unique(np.linspace(0, len(dataset) - 1, _READ).astype(int)):
            rows, length = _token_shape(collate([dataset[int(index)]]))
            if rows != 1:
                return np.zeros(0, int)
            lengths.append(length)
    finally:
        restore_random_state(random)
    return np.asarray(lengths, int)


def _best_buckets(maxima: np.ndarray, unit: int, count: int) -> list[int]:
    """At most ``count`` multiples of ``unit``, or the largest of ``maxima``, that add the least to ``maxima``."""
    longest = int(maxima.max())
    candidates, number = np.unique(np.minimum(-(-maxima // unit) * unit, longest), return_counts=True)
    before = np.concatenate([[0], number.cumsum()])
    # cost[i]: elements of all batches up to candidate i, if it is the last of so many buckets as were added.
    cost = candidates * before[1:].astype(float)
    chosen = [[index] for index in range(len(candidates))]
    for _ in range(count - 1):
        step = cost[:, None] + candidates[None] * (before[None, 1:] - before[1:, None])
        step[np.tril_indices(len(candidates))] = np.inf  # a bucket follows a smaller one
        best = step.argmin(0)
        better = step.min(0) < cost
        chosen = [[*chosen[best[index]], index] if better[index] else chosen[index] for index in range(len(candidates))]
        cost = np.minimum(cost, step.min(0))
    return [int(candidates[index]) for index in chosen[-1]]

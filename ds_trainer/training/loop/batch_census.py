"""What the labels and tokens of the first steps are: targets by source, padding, shifts, equal samples.

Counts tensors in host memory only, so nothing waits for a device; what a collator puts on one is not counted.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ds_trainer.data.batch_structure import Dummy
from ds_trainer.data.lockstep import fingerprint
from ds_trainer.data.sequence_sharding import IGNORED
from ds_trainer.data.sharded_batch import ShardedBatch
from ds_trainer.data.source_ids import SOURCE_IDS
from ds_trainer.training.loop.batches import labels_in
from ds_trainer.utils import distributed

_FEW_ROWS, _FEW_TOKENS = 8, 256  # fewer say nothing
_FEW_SEEN, _MOST_SEEN = 3, 4096
_COUNTS = ("rows", "empty", "tokens", "targets", "padding", "shiftable", "next", "same")


class SeenSamples:
    """Samples of the first steps of this rank, with which the first evaluations are compared.

    Args:
        main_input: key of the token ids.
    """

    def __init__(self, main_input: str) -> None:
        self._main_input = main_input
        self._seen: set[bytes] = set()
        self._compared = self._known = 0

    def add(self, batch: Mapping[str, Any]) -> None:
        """Remember the samples of a micro-batch of the training."""
        if len(self._seen) < _MOST_SEEN:
            self._seen.update(self._digests(batch))

    def compare(self, batch: Any) -> None:
        """Look for the samples of a batch of an evaluation."""
        if isinstance(batch, Mapping) and not isinstance(batch, Dummy):
            found = self._digests(batch)
            self._compared += len(found)
            self._known += sum(digest in self._seen for digest in found)

    def finding(self) -> str | None:
        """What to warn of after an evaluation; None if it has other samples. Collective."""
        counts = torch.tensor([self._known, self._compared]).to(distributed.collective_device())
        self._compared = self._known = 0
        distributed.all_reduce_sum(counts)
        known, compared = counts.tolist()
        if known < _FEW_SEEN:
            return None
        return (
            f"At least {known:,} of the {compared:,} samples of this evaluation are training samples (of the first "
            "steps): its loss does not show what the model does with new data. Take them out of train_dataset or "
            "eval_dataset."
        )

    def _digests(self, batch: Mapping[str, Any]) -> list[bytes]:
        """One for each sample of a few tokens or more, without what its attention_mask hides."""
        tokens, mask = _on_host(batch.get(self._main_input)), _on_host(batch.get("attention_mask"))
        if tokens is None:
            return []
        if mask is None or mask.shape != tokens.shape:
            mask = torch.ones_like(tokens)
        rows = [row[used.bool()] for row, used in zip(tokens, mask, strict=True)]
        return [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).digest() for row in rows if len(row) >= _FEW_ROWS]


class BatchCensus:
    """Counts over micro-batches of this rank.

    Args:
        label_names: keys of a batch that may have labels.
        main_input: key of the token ids.
        shifted: whether the model compares output ``t`` with label ``t + 1``.
        sources: names of the sources by number.
        samples: samples of the dataset; None if it has no length.
        replicas: replicas that read different samples.
        seen: gets the samples.
    """

    def __init__(
        self,
        label_names: Sequence[str],
        main_input: str,
        shifted: bool,
        sources: Sequence[str],
        samples: int | None,
        replicas: int,
        seen: SeenSamples,
    ) -> None:
        self._seen = seen
        self._label_names = tuple(label_names)
        self._main_input = main_input
        self._shifted = shifted
        self._sources = tuple(sources)
        self._samples = samples
        self._replicas = replicas
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._of_sources = torch.zeros(2, len(self._sources), dtype=torch.int64)  # tokens and targets
        self._different: set[int] = set()
        self._batches: set[int] = set()  # the first two that differ, of any structure
        self._digest = 0

    def add(self, batches: Iterable[Any]) -> None:
        """Count the micro-batches of a step."""
        for batch in batches:
            is_shard = isinstance(batch, ShardedBatch)
            local = batch.local if is_shard else batch
            if len(self._batches) < 2 and not is_shard:
                self._batches.add(fingerprint(local))
            if isinstance(local, Mapping) and not isinstance(local, Dummy):
                if not is_shard:
                    self._seen.add(local)
                self._add(local, is_shard)

    def _add(self, batch: Mapping[str, Any], is_shard: bool) -> None:
        counts, tokens = self._counts, _on_host(batch.get(self._main_input))
        if tokens is not None and not is_shard:
            for row in tokens.contiguous():
                digest = zlib.crc32(row.numpy().tobytes())
                self._digest = zlib.crc32(digest.to_bytes(4, "little"), self._digest)
                if len(self._different) < _FEW_ROWS:
                    self._different.add(digest)
        name = "shift_labels" if "shift_labels" in batch else labels_in(batch, self._label_names)
        labels = _on_host(batch.get(name)) if name is not None else None
        if labels is None:
            return
        targets = labels != IGNORED
        if self._shifted and name != "shift_labels":
            targets = targets[:, 1:]
        if not is_shard:
            counts["rows"] += len(labels)
            counts["empty"] += int((~targets.any(dim=1)).sum())
        counts["tokens"] += targets.numel()
        counts["targets"] += int(targets.sum())
        self._add_sources(_on_host(batch.get(SOURCE_IDS)), targets)
        if tokens is None or tokens.shape != labels.shape or is_shard:
            return
        same, valid = labels == tokens, labels != IGNORED
        mask = _on_host(batch.get("attention_mask"))
        if mask is not None and mask.shape == labels.shape:
            counts["padding"] += int((valid & same & (mask == 0)).sum())
        if self._shifted:
            valid = valid[:, :-1]
            counts["shiftable"] += int(valid.sum())
            counts["next"] += int((valid & (labels[:, :-1] == tokens[:, 1:])).sum())
            counts["same"] += int((valid & same[:, :-1]).sum())

    def _add_sources(self, ids: torch.Tensor | None, targets: torch.Tensor) -> None:
        if ids is None or not self._sources or ids.shape[0] != targets.shape[0]:
            return
        ids = ids[:, -targets.shape[1] :].flatten()
        for row, weights in enumerate((torch.ones_like(ids), targets.flatten().long())):
            self._of_sources[row].index_add_(0, ids, weights)

    def findings(self, steps: int) -> Iterator[str]:
        """One sentence for each thing that is not as it should be, over the ranks. Collective."""
        summed = torch.cat([torch.tensor(list(self._counts.values())), self._of_sources.flatten()])
        device = distributed.collective_device()
        summed = summed.to(device)
        distributed.all_reduce_sum(summed)
        values = summed.tolist()
        counts = dict(zip(_COUNTS, values, strict=False))
        tokens, targets = torch.tensor(values[len(_COUNTS) :]).view(2, -1).tolist()
        own = self._digest or sum(self._batches)
        different, batches, last, first = distributed.largest(
            torch.tensor([len(self._different), len(self._batches), own, -own])
        ).tolist()
        when = "in the first step" if steps == 1 else f"in the first {steps} steps"
        sources = list(self._about_sources(tokens, targets, when))
        yield from sources
        yield from self._about_targets(counts, when, bool(sources))
        yield from self._about_samples(counts["rows"], int(different), int(batches), last == -first, when)

    def _about_targets(self, counts: Mapping[str, int], when: str, explained: bool) -> Iterator[str]:
        rows, empty, tokens, targets = (counts[name] for name in ("rows", "empty", "tokens", "targets"))
        remedy = "Check what the dataset and the data_collator mask, and whether max_length cuts the answers off."
        why = f"all labels are {IGNORED}" if tokens else "each sample has one token, and no next one to predict"
        if targets == 0 and (tokens >= _FEW_TOKENS or (tokens == 0 and rows >= _FEW_ROWS)):
            yield f"There is no target {when}: {why}, so nothing is learned. {remedy}"
        elif rows >= _FEW_ROWS and empty * 2 > rows and not explained:
            yield (
                f"{_percent(empty, rows)} of the samples {when} have no target (all their labels are {IGNORED}): only "
                f"{_percent(targets, tokens)} of the tokens are trained. {remedy}"
            )
        if counts["padding"] * 20 > targets > 0:
            yield (
                f"{_percent(counts['padding'], targets)} of the targets {when} are padding: attention_mask is 0 where "
                f"the label is the token itself. The model learns to predict padding. Set labels to {IGNORED} where "
                "attention_mask is 0."
            )
        pairs = counts["shiftable"]
        if pairs >= _FEW_TOKENS // 4 and counts["next"] >= 0.95 * pairs and counts["same"] * 2 < pairs:
            yield (
                f"The labels {when} are the next tokens (label t is token t + 1), but the model shifts labels itself: "
                "it learns to predict the token after the next one. Give it labels that equal input_ids."
            )

    def _about_sources(self, tokens: list[int], targets: list[int], when: str) -> Iterator[str]:
        for name, seen, trained in zip(self._sources, tokens, targets, strict=False):
            if any(targets) and seen >= _FEW_TOKENS and trained * 1000 < seen:
                share = "none" if trained == 0 else f"only {trained:,}"
                yield (
                    f"Source {name!r}: {share} of its {seen:,} tokens {when} is a target, so (almost) nothing is "
                    "learned from it. Check its columns and its template, and whether max_length cuts its answers off; "
                    "or remove it from the mixture."
                )

    def _about_samples(self, rows: int, different: int, batches: int, all_same: bool, when: str) -> Iterator[str]:
        several = self._samples is None or self._samples > 1
        if rows >= _FEW_ROWS * self._replicas and different == 1 and all_same and several:
            yield (
                f"All samples {when} have the same tokens. Look at the dataset after tokenization: a prompt that is "
                "longer than max_length leaves nothing else."
            )
        elif self._replicas > 1 and all_same and max(different, batches) > 1:
            yield (
                f"All {self._replicas} data-parallel replicas had the same samples {when}, so the batch is not larger "
                "than that of one. Return self.accelerator.prepare(loader) from get_train_dataloader, let the Trainer "
                "make the loader, or give its sampler the rank (DistributedSampler with num_replicas and rank)."
            )


def _on_host(value: Any) -> torch.Tensor | None:
    """``value`` if it is a matrix of integers in host memory."""
    fits = isinstance(value, torch.Tensor) and value.dim() == 2 and value.device.type == "cpu"
    return value if fits and not value.is_floating_point() and value.dtype != torch.bool else None


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %"

"""``ShardedBatch``: the part of a micro-batch that one rank of a replica holds, cut before it is sent.

With context or sequence parallelism a rank needs its tokens only, so the reading rank sends each rank its own shard
(:func:`ds_trainer.data.replica.replica_batches`), and keeps its own. What the step must know about the whole batch is
determined before: the number of items, the sizes, which documents there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ds_trainer.data.batch_structure import DummyBatch, as_dummy
from ds_trainer.data.sequence_sharding import IGNORED, SequenceSharder, unshard
from ds_trainer.parallel.sequence_plan import SequencePlan

if TYPE_CHECKING:
    from ds_trainer.parallel.groups import ParallelGroups


class BatchFacts(NamedTuple):
    """What a step needs to know about a whole micro-batch.

    Attributes:
        items: the number of its items, an int64 scalar.
        size: its size, as the counter of tokens measures it; in an evaluation, its samples.
        has_loss: whether it has a loss, which a batch may lack in an evaluation only.
        text: the tokens of each packed row without the room at its end; empty if nothing asks for it.
    """

    items: torch.Tensor
    size: Any
    has_loss: bool = True
    text: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """The shard of one rank.

    Attributes:
        local: what the model gets.
        plan: which rank holds which tokens.
        facts: about the whole batch.
        length: tokens of each sequence before padding.
        shifted: the names in ``local`` whose value at ``t`` is that of ``t + 1`` in the whole batch.
        beginning: a short whole batch with tokens of this one, the same on all ranks, for the checks before the first
            step; only in the first batch that is cut.
    """

    local: dict[str, Any]
    plan: SequencePlan
    facts: BatchFacts
    length: int
    shifted: tuple[str, ...] = ()
    beginning: Mapping[str, Any] | None = None

    def as_dummy(self) -> ShardedBatch:
        """This shard as a batch without effect."""
        facts = self.facts._replace(items=torch.zeros_like(self.facts.items))
        return replace(self, local=DummyBatch(self.local), facts=facts)


def dummy_of(batch: Any) -> Any:
    """``batch``, whole or a shard, as one without effect."""
    return batch.as_dummy() if isinstance(batch, ShardedBatch) else as_dummy(batch)


class BatchSharder:
    """Cuts the micro-batches of a run.

    Args:
        sharder: cuts a batch.
        describe: the facts about a whole batch.
        beginning: makes the short batch that goes to every rank with its shard of the first one.
    """

    def __init__(
        self,
        sharder: SequenceSharder,
        describe: Callable[[Any], BatchFacts],
        beginning: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._sharder = sharder
        self._describe = describe
        self._beginning: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = beginning

    def shards(self, batch: Mapping[str, Any], groups: ParallelGroups) -> Iterator[ShardedBatch]:
        """The shard of each rank of this replica, one after the other, in the order of ``groups.replica_host``.

        Raises:
            ConfigError: the batch cannot be cut; before the first shard.
        """
        facts, layout = self._describe(batch), groups.layout
        beginning = None if self._beginning is None else self._beginning(batch)
        self._beginning = None
        shifted = self._sharder.shifted_labels(batch)
        plan = None
        for rank in dist.get_process_group_ranks(groups.replica_host):
            at = layout.coordinates(rank)
            local, plan = self._sharder.shard(batch, at.cp, at.sp, needs_labels=facts.has_loss, plan=plan)
            yield ShardedBatch(local, plan, facts, self._sharder.length(batch), shifted, beginning)


def whole_batch(batch: ShardedBatch, groups: ParallelGroups) -> dict[str, Any]:
    """The batch of which ``batch`` is a shard, in host memory. Collective over the replica.

    Labels that are shifted in a shard are not in the result; the first of a row is unknown, and is ignored.
    """
    own = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in batch.local.items()}
    received: list[Any] = [None] * groups.replica_host.size()
    dist.all_gather_object(received, own, group=groups.replica_host)
    ranks = dist.get_process_group_ranks(groups.replica_host)
    shards = [part for rank, part in zip(ranks, received, strict=True) if groups.layout.coordinates(rank).tp == 0]
    tokens = batch.plan.length // len(shards)
    whole: dict[str, Any] = {}
    for key, value in own.items():
        parts = [shard[key] for shard in shards]
        sharded = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == tokens
        whole[key] = unshard(parts, batch.plan, batch.length) if sharded else value
        if key in batch.shifted:
            whole[key] = torch.nn.functional.pad(whole[key][:, :-1], (1, 0), value=IGNORED)
    if batch.shifted:
        whole.pop("shift_labels", None)
    return whole


def plain_batches(batches: Sequence[Any], groups: Callable[[], ParallelGroups]) -> list[Any]:
    """``batches`` with whole batches in place of shards. Collective over the replica if there are any."""
    return [whole_batch(batch, groups()) if isinstance(batch, ShardedBatch) else batch for batch in batches]

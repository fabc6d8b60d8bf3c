"""Which random state a rank restores when the layout has changed since the checkpoint."""

from __future__ import annotations

from ds_trainer.parallel.layout import ParallelLayout


def rank_with_random_state(written: ParallelLayout, present: ParallelLayout, rank: int) -> int:
    """Returns the rank whose random state ``rank`` restores from a checkpoint of the layout ``written``.

    In the same layout, that is ``rank`` itself. In another layout, it is the first rank of the replica with the same
    index, because the ranks of a replica must have equal random states. Replicas that did not exist use the first
    replica's.
    """
    if written == present:
        return rank
    replica = present.coordinates(rank).dp
    return written.rank_at(dp=replica if replica < written.dp else 0)

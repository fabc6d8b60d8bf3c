"""Whose random state a rank goes on with, when the ranks stand elsewhere than they stood."""

from __future__ import annotations

from ds_trainer.parallel.layout import ParallelLayout


def rank_with_random_state(written: ParallelLayout, present: ParallelLayout, rank: int) -> int:
    """Whose random state ``rank`` takes from a checkpoint of the layout ``written``.

    Its own where the layout is the same. Elsewhere that of the first rank of the replica with the same number, so that
    the ranks of a replica stay equal, which they must be; replicas that did not exist take the first one's.
    """
    if written == present:
        return rank
    replica = present.coordinates(rank).dp
    return written.rank_at(dp=replica if replica < written.dp else 0)

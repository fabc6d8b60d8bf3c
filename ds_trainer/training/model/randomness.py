"""Random numbers of a model whose replica is spread over several ranks (tensor, context, sequence parallelism).

Tensor-parallel ranks of one place hold parts of the same computation and must draw the same numbers (dropout of what
they all hold; a rank's own parts are seen to by :mod:`ds_trainer.engine.tensor.randomness`). Ranks at other places of
dp, cp and sp see other tokens and must draw others. The state that a generator happens to be in promises neither: one
rank of a replica reads the data, and may draw numbers for that.

So the numbers of a micro-batch follow from the seed, the step, the micro-batch and the place alone, and a resumed run
draws them again. Pure data parallelism is left alone: its ranks draw on from where they are, as transformers' do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from ds_trainer.parallel.layout import Coordinates, ParallelLayout
from ds_trainer.utils.seeds import random_state, restore_random_state, seed_this_process

_SEEDS = 62  # bits, as many as every generator takes


def seed_of(seed: int, step: int, micro_batch: int, place: Coordinates) -> int:
    """The seed of a micro-batch on a rank: the same on the tensor-parallel ranks of one place."""
    name = "/".join(map(str, (seed, step, micro_batch, place.dp, place.cp, place.sp)))
    return random.Random(name).getrandbits(_SEEDS)


@contextmanager
def randomness_of(layout: ParallelLayout, place: Coordinates, seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Inside, all generators of this process draw the numbers of a micro-batch; afterwards they go on as before.

    Args:
        layout: nothing happens where a replica is one rank.
        place: of this rank.
        seed: of the run.
        step: optimizer steps done.
        micro_batch: index within the step.
    """
    if layout.replica_size == 1:
        yield
        return
    outside = random_state()
    seed_this_process(seed_of(seed, step, micro_batch, place))
    try:
        yield
    finally:
        restore_random_state(outside)
